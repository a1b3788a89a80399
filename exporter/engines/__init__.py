"""What serving engines say of themselves. One module an engine, one row in ENGINES (`known`).

Owns the way from an engine's metrics page to `Serving`. Refuses to judge: shares and leaks are the core's.
"""
