"""Live, ordered, gap-free event streams across journals, by tag."""
