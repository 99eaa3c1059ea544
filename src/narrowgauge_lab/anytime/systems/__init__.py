"""The trained systems that answer more than once, each a network of the one interface."""
