"""The engine at run time: its driver, clocks, event loop, observers, and the queries of applications."""
