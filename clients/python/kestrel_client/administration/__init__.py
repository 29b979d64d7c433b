"""The clients of AdminService."""
