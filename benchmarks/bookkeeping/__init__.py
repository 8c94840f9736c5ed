"""What a prefix cache costs: microseconds and bytes, beside the real code of vLLM and SGLang.

Run `python -m benchmarks.bookkeeping --help`. Every contestant runs in a process of its own, the peers in their own
interpreters; the modules here that they import need the standard library alone.
"""
