"""The messages of AdminService."""
