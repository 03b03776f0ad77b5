"""What is different between two reports, two traces, or two parts of a trace's time."""
