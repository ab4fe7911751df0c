"""Who may ask and who goes next; knows endpoints and configuration."""
