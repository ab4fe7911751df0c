"""The engine model against real engines: step by step with measured kernels, and by the roofline that the lab uses."""
