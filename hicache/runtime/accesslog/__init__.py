"""The access log: what requests asked for and got, by page hashes alone, in files of bounded size."""
