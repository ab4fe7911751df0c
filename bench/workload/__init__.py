"""What is sent: generated traffic and public traces as plain data; knows engine."""
