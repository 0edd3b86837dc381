"""The migrations of the invoices."""
