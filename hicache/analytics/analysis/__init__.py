"""What a trace itself tells: what could hit, with how much memory, and because of which prefixes."""
