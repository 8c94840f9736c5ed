"""Anaphora under Ray Serve: requests routed to where their prefix is, and engines that serve them."""

from anaphora.integrations.ray_serve.app import build_app, openai_app
from anaphora.integrations.ray_serve.engine import EngineReplica
from anaphora.integrations.ray_serve.ingress import OpenAIIngress
from anaphora.integrations.ray_serve.messages import AnswerHead, HttpCall
from anaphora.integrations.ray_serve.router import PrefixRouter

__all__ = ["AnswerHead", "EngineReplica", "HttpCall", "OpenAIIngress", "PrefixRouter", "build_app", "openai_app"]
