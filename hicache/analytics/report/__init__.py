"""Reports: what the other commands have found, as one page with plots and tables, as Markdown, or as JSON."""
