"""Programs that write derived files; nothing that runs in production."""
