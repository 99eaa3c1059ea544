"""`narrowgauge serve`: the results as local pages. Read-only, and on 127.0.0.1 alone.

    server    the socket, and how long it is served
    app       which address gives which page
    guard     who may ask what: loopback, our own name, reading only; the policy of every answer
    runs      runs of the store as pages show them; names from a request never become paths
    follow    a run that goes on: progress, curves, log, energy
    curves    series as SVG

starlette and uvicorn: small, kept, and typed. Whatever a record says is escaped by jinja2 and,
since the content policy allows no inline script, could not run if it were not.
"""
