"""Whole engines on one machine: prefill, decode, time to first token, a shared prefix, start-up, memory; in one run.

Anaphora's executors beside llama.cpp and vLLM's CPU engine, taking turns, on the same model and the same random tokens.
"""
