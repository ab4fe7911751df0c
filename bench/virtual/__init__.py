"""The same decisions and the same engine model in virtual time: hours of traffic in minutes, and no machine to wait for."""
