"""One small log of every format, invented, and where the wider project's own samples lie if a checkout has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parents[3] / "shared"
SYSTEM = "You keep the lending desk of a toy library. Answer shortly."


def jsonl(*documents: Any) -> bytes:
    return b"".join(json.dumps(document).encode() + b"\n" for document in documents)


def chat(user: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}],
        **fields,
    }


def openai_line(second: int, user: str, prompt: int, cached: int | None) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": 5}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return {
        "timestamp": f"2026-05-01T10:00:{second:02}Z",
        "request": chat(user),
        "response": {"id": f"r{second}", "usage": usage},
    }


def claude_line(uuid: str, request: str, second: int) -> dict[str, Any]:
    usage = {"input_tokens": 10, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 5, "output_tokens": 7}
    content = [{"type": "text", "text": "x"}]
    return {
        "type": "assistant",
        "uuid": uuid,
        "sessionId": "s",
        "requestId": request,
        "timestamp": f"2026-05-01T10:00:{second:02}Z",
        "message": {"id": request, "model": "m", "role": "assistant", "content": content, "usage": usage},
    }


ANTHROPIC_USAGE = {
    "input_tokens": 5,
    "cache_read_input_tokens": 1200,
    "cache_creation_input_tokens": 300,
    "cache_creation": {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200},
    "output_tokens": 3,
}

SAMPLES: dict[str, bytes] = {
    "mooncake": jsonl(
        {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]},
        {"timestamp": 900, "input_length": 1300, "output_length": 20, "hash_ids": [0, 1, 3]},
    ),
    "bailian": jsonl(
        {"chat_id": 0, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 35, "hash_ids": [11, 12, 13]},
        {"chat_id": 1, "parent_chat_id": 0, "timestamp": 2.5, "input_length": 52, "hash_ids": [11, 12, 14, 15]},
    ),
    "weka": jsonl(
        {
            "id": "w",
            "models": ["m"],
            "block_size": 64,
            "requests": [
                {"t": 0.0, "type": "s", "model": "m", "in": 130, "out": 4, "hash_ids": [1, 2, 3], "api_time": 1.5},
                {"t": 4.0, "type": "s", "model": "m", "in": 128, "out": 4, "hash_ids": [1, 2]},
            ],
        }
    ),
    "openai-batch": jsonl(
        {"custom_id": "c0", "method": "POST", "url": "/v1/chat/completions", "body": chat("one")},
        {"custom_id": "c1", "method": "POST", "url": "/v1/chat/completions", "body": chat("two")},
    ),
    "litellm": jsonl(
        {
            "request_id": "q1",
            "call_type": "acompletion",
            "spend": 0.0011,
            "prompt_tokens": 1210,
            "completion_tokens": 5,
            "startTime": "2026-05-01T10:00:00Z",
            "model": "m",
            "cache_hit": "False",
            "metadata": {
                "usage_object": {
                    "prompt_tokens": 1210,
                    "prompt_tokens_details": {"cached_tokens": 1000, "cache_creation_tokens": 200},
                }
            },
            "messages": {},
            "response": {},
        },
        {
            "request_id": "q2",
            "call_type": "acompletion",
            "spend": 0,
            "startTime": "2026-05-01T10:00:00Z",
            "cache_hit": "True",
        },
    ),
    "gateway": (
        b"timestamp,model_name,status_code,request_json,response_json\n"
        b'2026-05-01T10:00:00Z,m,200,"{""messages"":[{""role"":""user"",""content"":""hi""}]}",'
        b'"{""usage"":{""prompt_tokens"":9,""prompt_tokens_details"":{""cached_tokens"":4}}}"\n'
    ),
    "claude-code": jsonl(
        {"type": "user", "uuid": "u0", "sessionId": "s", "message": {"role": "user", "content": "hi"}},
        claude_line("u1", "r1", 1),
        claude_line("u2", "r1", 2),
        claude_line("u2", "r1", 2),
        {
            "type": "assistant",
            "uuid": "u9",
            "sessionId": "s",
            "message": {"id": "m2", "model": "<synthetic>", "usage": {"input_tokens": 0}},
        },
        claude_line("u4", "r2", 3),
    ),
    "codex": jsonl(
        {"type": "session_meta", "payload": {"id": "c"}},
        *(
            {
                "type": "event_msg",
                "timestamp": "2026-05-01T10:00:00Z",
                "payload": {
                    "type": "token_count",
                    "info": {
                        "last_token_usage": {"input_tokens": 50, "cached_input_tokens": 40, "output_tokens": 2},
                        "total_token_usage": {"input_tokens": total, "cached_input_tokens": 0, "output_tokens": 2},
                    },
                },
            }
            for total in (50, 50, 100)
        ),
    ),
    "langfuse": jsonl(
        {
            "id": "o1",
            "traceId": "t",
            "sessionId": "s",
            "type": "GENERATION",
            "startTime": "2026-05-01T10:00:00Z",
            "model": "m",
            "input": [{"role": "user", "content": "hi"}],
            "usageDetails": {
                "input": 10,
                "cache_read_input_tokens": 1000,
                "cache_creation_input_tokens": 200,
                "output": 5,
                "total": 1215,
            },
        }
    ),
    "otlp": json.dumps(
        {
            "resourceSpans": [
                {
                    "scopeSpans": [
                        {
                            "spans": [
                                {
                                    "spanId": "01",
                                    "startTimeUnixNano": "1777629600000000000",
                                    "attributes": [
                                        {"key": "gen_ai.request.model", "value": {"stringValue": "m"}},
                                        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "1210"}},
                                        {"key": "gen_ai.usage.cache_read.input_tokens", "value": {"intValue": "1000"}},
                                        {
                                            "key": "gen_ai.usage.cache_creation.input_tokens",
                                            "value": {"intValue": "200"},
                                        },
                                    ],
                                },
                                {
                                    "spanId": "02",
                                    "attributes": [{"key": "http.method", "value": {"stringValue": "GET"}}],
                                },
                            ]
                        }
                    ]
                }
            ]
        },
        indent=1,
    ).encode(),
    "sharegpt": json.dumps(
        [
            {
                "id": "a",
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "hello"},
                    {"from": "human", "value": "where?"},
                ],
            }
        ]
    ).encode(),
    "kv-events": jsonl(
        {"topic": "kv@p1@m", "seq": 0, "ts": 1.0, "events": [["BlockStored", [1, 2], None, [1] * 8, 4, None, "GPU"]]},
        {
            "topic": "kv@p1@m",
            "seq": 2,
            "ts": 2.0,
            "events": [{"type": "BlockRemoved", "block_hashes": [2, 7], "medium": "GPU"}],
        },
        {"topic": "kv@p1@m", "seq": 3, "ts": 3.0, "events": [["AllBlocksCleared"]]},
    ),
    "anthropic": jsonl(
        {
            "request": {
                "model": "m",
                "max_tokens": 8,
                "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
                "messages": [{"role": "user", "content": "q"}],
            },
            "response": {"id": "msg_0", "usage": ANTHROPIC_USAGE},
        }
    ),
    "openai": jsonl(
        openai_line(0, "bulbs?", 40, 0), openai_line(1, "hose?", 41, 32), openai_line(2, "pots?", 42, None)
    ),
    "burstgpt": (
        b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        b"5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n"
    ),
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2026-05-01 10:00:00.0000000,374,44\n",
    "vllm": (
        b"INFO 05-01 10:00:00 [logger.py:39] Received request chat-1: prompt: 'It\\'s \"here\"\\nnow', params: "
        b"SamplingParams(n=1), prompt_token_ids: [1, 2, 3, 4, 5], lora_request: None.\n"
        b"INFO 05-01 10:00:00 [async_llm.py:270] Added request chat-1.\n"
    ),
    "sglang": (
        b"[2026-05-01 10:00:00] Receive: obj=GenerateReqInput(rid='a1', text='hello', input_ids=[7, 8], "
        b"extra_key='team', lora_path=None)\n[2026-05-01 10:00:01] Finish: obj=GenerateReqInput(rid='a1')\n"
    ),
    "prometheus": (
        b"# HELP x y\n"
        b'vllm:prefix_cache_queries_total{model_name="m"} 1000\nvllm:prefix_cache_hits_total{model_name="m"} 400\n'
        b'vllm:kv_cache_usage_perc{model_name="m"} 0.3\nvllm:num_preemptions_total{model_name="m"} 2\n'
    ),
}
