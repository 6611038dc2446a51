"""The HTTP server of `jaxspec serve`; only this package imports starlette, uvicorn and prometheus_client."""
