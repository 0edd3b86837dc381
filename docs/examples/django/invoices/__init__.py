"""Customers and what they are billed."""
