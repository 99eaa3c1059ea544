"""Networks that answer more than once: their one interface, its drivers, and the systems."""
