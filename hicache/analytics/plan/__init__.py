"""How much memory a model's state takes, by arithmetic alone."""
