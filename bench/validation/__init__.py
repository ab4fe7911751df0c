"""The engine model against real engines; knows engine, virtual and reporting."""
