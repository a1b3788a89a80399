"""The accounting core: pure functions and values, without I/O, clock, threads or logging."""
