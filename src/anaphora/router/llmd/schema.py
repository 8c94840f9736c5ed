"""The shape of llm-d's EndpointPickerConfig (v1alpha1), and of each plugin's parameters. Unknown fields are refused."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field


class _Strict(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class PluginSpec(_Strict, frozen=True):
    """One plugin instance; `name` is its type where it is left out."""

    type: str
    name: str = ""
    parameters: dict[str, Any] | None = None


class PluginRef(_Strict, frozen=True):
    """A plugin in a profile. weight: of a scorer."""

    plugin_ref: str
    weight: float | None = None


class ProfileSpec(_Strict, frozen=True):
    """A scheduling profile."""

    name: str
    plugins: list[PluginRef] = field(default_factory=list)


class Ref(_Strict, frozen=True):
    """The name of a plugin."""

    plugin_ref: str


class SourceSpec(_Strict, frozen=True):
    """A source of the data layer with its extractors."""

    plugin_ref: str
    extractors: list[Ref] = field(default_factory=list)


class DataLayer(_Strict, frozen=True):
    """Where metrics and endpoints come from."""

    inject_defaults: bool = True
    sources: list[SourceSpec] = field(default_factory=list)
    discovery: Ref | None = None


class RequestHandler(_Strict, frozen=True):
    """Which bodies are understood."""

    parsers: list[Ref] = field(default_factory=list)


class FileConfig(_Strict, frozen=True):
    """The whole file."""

    api_version: str
    kind: str
    feature_gates: list[str] = field(default_factory=list)
    plugins: list[PluginSpec] = field(default_factory=list)
    scheduling_profiles: list[ProfileSpec] = field(default_factory=list)
    data_layer: DataLayer | None = None
    flow_control: dict[str, Any] | None = None
    request_handler: RequestHandler | None = None
    saturation_detector: Ref | None = None
    parser: Ref | None = None


class NoParameters(_Strict, frozen=True):
    """For plugins without any."""


class PrefixScorerParameters(_Strict, frozen=True):
    """prefix-cache-scorer."""

    prefix_match_info_producer_name: str = ""
    match_length_weight: float = 0.0
    match_length_scale_tokens: int = 8192


class ApproxParameters(_Strict, frozen=True):
    """approx-prefix-cache-producer."""

    auto_tune: bool = True
    block_size_tokens: int = 16
    max_prefix_tokens_to_match: int = 131_072
    max_prefix_blocks_to_match: int = 2048
    lru_capacity_per_server: int = 31_250
    block_size: int | None = None


class TokenProcessor(_Strict, frozen=True):
    """How events' tokens become keys."""

    block_size_tokens: int = 16
    block_size: int | None = None
    hash_seed: str = ""


class CostAware(_Strict, frozen=True):
    """An index bounded in bytes."""

    size: str = "2GiB"


class InMemory(_Strict, frozen=True):
    """An index bounded in keys."""

    size: int = 100_000_000
    pod_cache_size: int = 10


class KvBlockIndex(_Strict, frozen=True):
    """Which index. Those of other processes are not offered here."""

    cost_aware_memory_config: CostAware | None = None
    in_memory_config: InMemory | None = None
    enable_metrics: bool = False
    metrics_logging_interval: Any = None


class Backend(_Strict, frozen=True):
    """A tier and its weight."""

    name: str
    weight: float = 1.0


class Indexer(_Strict, frozen=True):
    """The index and its tiers."""

    kv_block_index_config: KvBlockIndex | None = None
    kv_cache_backend_configs: list[Backend] = field(default_factory=list)


class PodDiscovery(_Strict, frozen=True):
    """Where publishers are found."""

    pod_label_selector: str = "llm-d.ai/inference-serving=true"
    pod_namespace: str = ""
    socket_port: int = 5557
    replay_socket_port: int | None = None


class KvEvents(_Strict, frozen=True):
    """How events are received."""

    zmq_endpoint: str = ""
    topic_filter: str = "kv@"
    concurrency: int = 4
    engine_type: str = ""
    discover_pods: bool = True
    pod_discovery_config: PodDiscovery = field(default_factory=PodDiscovery)


class PreciseParameters(_Strict, frozen=True):
    """precise-prefix-cache-producer, and the deprecated precise-prefix-cache-scorer."""

    token_processor_config: TokenProcessor = field(default_factory=TokenProcessor)
    indexer_config: Indexer = field(default_factory=Indexer)
    kv_events_config: KvEvents = field(default_factory=KvEvents)
    speculative_indexing: bool = False
    speculative_ttl: str = field(default="2s", name="speculativeTTL")
    prefix_match_info_producer_name: str = ""
    match_length_weight: float = 0.0
    match_length_scale_tokens: int = 8192


class AffinityFilterParameters(_Strict, frozen=True):
    """prefix-cache-affinity-filter."""

    affinity_threshold: float = 0.80
    exploration_probability: float = 0.0
    max_ttft_penalty_ms: float = field(default=18_000, name="maxTTFTPenaltyMs")
    ttft_source: str = "prefillThroughput"
    peak_prefill_throughput: float = 15_928
    prefix_match_info_producer_name: str = ""
    latency_prediction_info_producer_name: str = ""
    in_flight_load_producer_name: str = ""


class NoHitLruParameters(_Strict, frozen=True):
    """no-hit-lru-scorer."""

    lru_size: int = 1024
    prefix_match_info_producer_name: str = ""


class LoadAwareParameters(_Strict, frozen=True):
    """load-aware-scorer."""

    threshold: int = 128


class ActiveRequestParameters(_Strict, frozen=True):
    """active-request-scorer."""

    idle_threshold: int = 0
    max_busy_score: float = 1.0
    in_flight_load_producer_name: str = ""


class TokenLoadParameters(_Strict, frozen=True):
    """token-load-scorer."""

    queue_threshold_tokens: int = 4_194_304
    in_flight_load_producer_name: str = ""


class ContextLengthParameters(_Strict, frozen=True):
    """context-length-aware. Filtering is not offered here."""

    enable_filtering: bool = False
    label: str = "llm-d.ai/context-length-range"


class SessionParameters(_Strict, frozen=True):
    """session-affinity-scorer and -filter."""

    header_name: str = "x-session-token"
    profile_name: str = ""


class LabelParameters(_Strict, frozen=True):
    """label-selector-filter."""

    selector: dict[str, str] = field(default_factory=dict)


class PickerParameters(_Strict, frozen=True):
    """Every picker."""

    max_num_of_endpoints: int = 1


class UtilisationParameters(_Strict, frozen=True):
    """utilization-detector."""

    queue_depth_threshold: float = 5
    kv_cache_util_threshold: float = 0.8
    metrics_staleness_threshold: str = "200ms"
    headroom: float = 0.0


class ConcurrencyParameters(_Strict, frozen=True):
    """concurrency-detector."""

    mode: str = "requests"
    max_concurrency: int = 100
    max_token_concurrency: int = 1_000_000
    headroom: float = 0.0


class TokenProducerParameters(_Strict, frozen=True):
    """token-producer. Tokens are made in this process, by the model given, whatever backend is named."""

    estimate: dict[str, Any] | None = None
    vllm: dict[str, Any] | None = None


class InflightParameters(_Strict, frozen=True):
    """inflight-load-producer."""

    add_estimated_output_tokens: bool = False
    prefix_match_info_producer_name: str = ""


class DiscoveryParameters(_Strict, frozen=True):
    """file-discovery."""

    path: str
    watch_file: bool = False


class DeciderParameters(_Strict, frozen=True):
    """prefix-based-pd-decider."""

    non_cached_tokens: int = 0


class DisaggProfiles(_Strict, frozen=True):
    """Names of profiles."""

    decode: str = "decode"
    prefill: str = "prefill"
    encode: str = ""


class DisaggDeciders(_Strict, frozen=True):
    """Names of deciders."""

    prefill: str = ""
    encode: str = ""


class DisaggParameters(_Strict, frozen=True):
    """disagg-profile-handler."""

    profiles: DisaggProfiles = field(default_factory=DisaggProfiles)
    deciders: DisaggDeciders = field(default_factory=DisaggDeciders)


class PdParameters(_Strict, frozen=True):
    """pd-profile-handler."""

    primary_port: int = 0
    decider_plugin_name: str = "prefix-based-pd-decider"


class Endpoint(_Strict, frozen=True):
    """An endpoint of a file-discovery file."""

    name: str
    address: str
    port: str
    namespace: str = "default"
    labels: dict[str, str] = field(default_factory=dict)


class EndpointsFile(_Strict, frozen=True):
    """A file-discovery file."""

    endpoints: list[Endpoint]


PARAMETERS: dict[str, type[Struct]] = {
    "prefix-cache-scorer": PrefixScorerParameters,
    "precise-prefix-cache-scorer": PreciseParameters,
    "approx-prefix-cache-producer": ApproxParameters,
    "precise-prefix-cache-producer": PreciseParameters,
    "prefix-cache-affinity-filter": AffinityFilterParameters,
    "no-hit-lru-scorer": NoHitLruParameters,
    "queue-scorer": NoParameters,
    "running-requests-size-scorer": NoParameters,
    "kv-cache-utilization-scorer": NoParameters,
    "load-aware-scorer": LoadAwareParameters,
    "active-request-scorer": ActiveRequestParameters,
    "token-load-scorer": TokenLoadParameters,
    "lora-affinity-scorer": NoParameters,
    "context-length-aware": ContextLengthParameters,
    "session-affinity-scorer": SessionParameters,
    "session-affinity-filter": SessionParameters,
    "label-selector-filter": LabelParameters,
    "decode-filter": NoParameters,
    "prefill-filter": NoParameters,
    "encode-filter": NoParameters,
    "utilization-detector": UtilisationParameters,
    "concurrency-detector": ConcurrencyParameters,
    "max-score-picker": PickerParameters,
    "random-picker": PickerParameters,
    "weighted-random-picker": PickerParameters,
    "single-profile-handler": NoParameters,
    "disagg-profile-handler": DisaggParameters,
    "pd-profile-handler": PdParameters,
    "prefix-based-pd-decider": DeciderParameters,
    "always-disagg-pd-decider": NoParameters,
    "token-producer": TokenProducerParameters,
    "tokenizer": TokenProducerParameters,
    "inflight-load-producer": InflightParameters,
    "file-discovery": DiscoveryParameters,
    "metrics-data-source": NoParameters,
    "core-metrics-extractor": NoParameters,
    "openai-parser": NoParameters,
    "anthropic-parser": NoParameters,
    "vllmhttp-parser": NoParameters,
}
"""Every plugin that is offered, by its type."""
