"""`hf-fp8kv serve`: transformers' own server over FP8 pages, with limits and a clean end.

    client ──> middleware ──> transformers' application ──> its handlers ──> engine ──> FP8 pages
               access, limits,                              messages become  continuous batching,
               checked bodies                               a prompt         sampling by request

Importing this package imports neither fastapi nor uvicorn; `run` does.
"""
