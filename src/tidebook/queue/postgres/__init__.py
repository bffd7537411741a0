"""The queue store on PostgreSQL."""
