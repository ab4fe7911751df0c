"""What is sent: generated conversations, and public traces, as one kind of plain data."""
