"""Loads llm-d's EndpointPickerConfig: the same file, the same meaning, for the plugins that are offered here."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import yaml

from anaphora.fleet.filters import FILTERS, Filter
from anaphora.fleet.pickers import PICKERS, MaxScorePicker, Picker
from anaphora.fleet.profile import AlwaysDecider, PrefixBasedDecider, Profile, ProfilePolicy, WeightedScorer
from anaphora.fleet.scorers import SCORERS, Scorer
from anaphora.router.admission import Concurrency, Saturation, Utilization
from anaphora.router.llmd import schema
from anaphora.router.llmd.schema import PARAMETERS, FileConfig, PluginSpec, ProfileSpec
from anaphora.router.replica import ReplicaSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

_VERSIONS = ("llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
_KIND = "EndpointPickerConfig"
_HANDLERS = ("single-profile-handler", "disagg-profile-handler", "pd-profile-handler")
_PRODUCERS = {"approx-prefix-cache-producer", "precise-prefix-cache-producer", "precise-prefix-cache-scorer"}
_SATURATION = Utilization()
_DEFAULT_PRODUCER = "approx-prefix-cache-producer"
_NOT_PASSED_ON = {
    "prefix_match_info_producer_name",
    "in_flight_load_producer_name",
    "latency_prediction_info_producer_name",
    "ttft_source",
    "enable_filtering",
    "header_name",
    "profile_name",
    "metrics_staleness_threshold",
    "token_processor_config",
    "indexer_config",
    "kv_events_config",
    "speculative_indexing",
    "speculative_ttl",
}
_PATH = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|KiB|MiB|GiB|TiB|k|M|G|T|)B?")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{unit}i{b}": 1024**i for i, unit in enumerate("KMGT", 1) for b in ("", "B")
}
_T = TypeVar("_T", bound=msgspec.Struct)


class ConfigError(ValueError):
    """A file that cannot be used; the message begins with the path of the field at fault."""


@dataclass(frozen=True, slots=True)
class PickerConfig:
    """What a file says.

    block_size, num_blocks: of the knowledge of replicas; num_blocks where a replica does not say.
    saturation: when requests of negative priority are shed.
    index_bytes: of the index, None for the default. kv_events_port, kv_replay_port: where replicas publish, if precise.
    """

    policy: ProfilePolicy
    block_size: int = 16
    num_blocks: int = 31_250
    index_bytes: int | None = None
    speculative_ttl_s: float | None = None
    kv_events_port: int | None = None
    kv_replay_port: int | None = None
    topic: str = ""
    discovery: Discovery | None = None
    saturation: Saturation = _SATURATION


@dataclass(frozen=True, slots=True)
class Discovery:
    """A file-discovery: a file of endpoints, and whether it is read again when it changes."""

    path: Path
    is_watched: bool
    config: PickerConfig

    def read(self, path: Path) -> list[ReplicaSpec]:
        """Return the replicas of the file. Raises ConfigError, OSError."""
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None
        specs: list[ReplicaSpec] = []
        for i, endpoint in enumerate(_convert(loaded, schema.EndpointsFile, "").endpoints):
            try:
                spec = ReplicaSpec.of(f"http://{endpoint.address}:{endpoint.port}")
            except ValueError as error:
                raise ConfigError(f"endpoints[{i}]: {error}") from None
            specs.append(with_events(replace(spec, labels=tuple(endpoint.labels.items())), self.config))
        return specs


def load_config(path: Path) -> PickerConfig:
    """Read a file in YAML or JSON. Raises ConfigError."""
    try:
        return parse_config(path.read_text(encoding="utf-8"), folder=path.parent)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_config(text: str, folder: Path | None = None) -> PickerConfig:
    """Read a configuration. folder: what relative paths in it begin at. Raises ConfigError."""
    try:
        loaded = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None
    config = _convert(loaded, FileConfig, "")
    if config.api_version not in _VERSIONS:
        raise ConfigError(f"apiVersion: expected {_VERSIONS[0]}, got {config.api_version!r}")
    if config.kind != _KIND:
        raise ConfigError(f"kind: expected {_KIND}, got {config.kind!r}")
    return _Loader(config, folder or Path()).load()


class _Loader:
    def __init__(self, config: FileConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._types: dict[str, str] = {}
        self._parameters: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}

    def load(self) -> PickerConfig:
        config = self._config
        for gate in config.feature_gates:
            if gate != "dataLayer":
                raise ConfigError(f"featureGates: {gate!r} is not supported here")
        if config.flow_control is not None:
            raise ConfigError("flowControl: not supported here; engines queue, and prices see it")
        plugins = config.plugins or self._default_plugins()
        for i, plugin in enumerate(plugins):
            self._declare(plugin, f"plugins[{i}]")
        self._check_references()
        profiles = self._profiles(weights={} if config.plugins else {"prefix-cache-scorer": 3.0} | dict.fromkeys(
            ("queue-scorer", "kv-cache-utilization-scorer"), 2.0))  # fmt: skip
        return self._picker_config(self._policy(profiles))

    @staticmethod
    def _default_plugins() -> list[PluginSpec]:
        return [PluginSpec(kind) for kind in ("queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer")]

    def _declare(self, plugin: PluginSpec, path: str) -> None:
        name = plugin.name or plugin.type
        if name in self._types:
            raise ConfigError(f"{path}.name: {name!r} is there already")
        if plugin.type not in PARAMETERS:
            raise ConfigError(f"{path}.type: {plugin.type!r} is not supported; supported are {', '.join(PARAMETERS)}")
        self._types[name] = plugin.type
        where = f"{path}.parameters"
        parameters = _convert(plugin.parameters or {}, PARAMETERS[plugin.type], where)
        self._parameters[name] = parameters
        _check_values(parameters, where)
        table = {**SCORERS, **FILTERS, **PICKERS}
        if plugin.type in table:
            options = {
                field: value
                for field, value in msgspec.structs.asdict(parameters).items()
                if field not in _NOT_PASSED_ON
            }
            self._objects[name] = table[plugin.type](**options)

    def _check_references(self) -> None:
        config = self._config
        for i, plugin in enumerate(config.plugins):
            for field in ("prefix_match_info_producer_name", "in_flight_load_producer_name"):
                producer = getattr(self._parameters[plugin.name or plugin.type], field, "")
                allowed = {_DEFAULT_PRODUCER, "inflight-load-producer"}
                if producer and producer not in self._types and producer not in allowed:
                    name = msgspec.structs.fields(PARAMETERS[plugin.type])
                    shown = next(f.encode_name for f in name if f.name == field)
                    raise ConfigError(f"plugins[{i}].parameters.{shown}: no plugin is called {producer!r}")
        refs = [("saturationDetector", config.saturation_detector), ("parser", config.parser)]
        if config.request_handler:
            refs += [(f"requestHandler.parsers[{i}]", r) for i, r in enumerate(config.request_handler.parsers)]
        if config.data_layer:
            refs.append(("dataLayer.discovery", config.data_layer.discovery))
            for i, source in enumerate(config.data_layer.sources):
                refs.append((f"dataLayer.sources[{i}]", schema.Ref(source.plugin_ref)))
                refs += [(f"dataLayer.sources[{i}].extractors[{j}]", r) for j, r in enumerate(source.extractors)]
        for path, ref in refs:
            if ref is not None and ref.plugin_ref not in self._types:
                raise ConfigError(f"{path}.pluginRef: no plugin is called {ref.plugin_ref!r}")

    def _profiles(self, weights: Mapping[str, float]) -> dict[str, Profile]:
        specs = self._config.scheduling_profiles or [
            ProfileSpec("default", [schema.PluginRef(name, weights.get(name)) for name in self._objects])
        ]
        profiles: dict[str, Profile] = {}
        for i, spec in enumerate(specs):
            path = f"schedulingProfiles[{i}]"
            if not spec.name:
                raise ConfigError(f"{path}.name: expected a name")
            if spec.name in profiles:
                raise ConfigError(f"{path}.name: {spec.name!r} is there already")
            profiles[spec.name] = self._profile(spec, path)
        return profiles

    def _profile(self, spec: ProfileSpec, path: str) -> Profile:
        filters: list[tuple[str, Filter]] = []
        scorers: list[WeightedScorer] = []
        pickers: list[Picker] = []
        for i, ref in enumerate(spec.plugins):
            where = f"{path}.plugins[{i}]"
            kind = self._types.get(ref.plugin_ref)
            if kind is None:
                raise ConfigError(f"{where}.pluginRef: no plugin is called {ref.plugin_ref!r}")
            if kind in SCORERS:
                scorer: Scorer = self._objects[ref.plugin_ref]
                scorers.append(WeightedScorer(ref.plugin_ref, scorer, 1.0 if ref.weight is None else ref.weight))
            elif ref.weight is not None:
                raise ConfigError(f"{where}.weight: only scorers have one, and {kind!r} is none")
            elif kind in FILTERS:
                filters.append((ref.plugin_ref, self._objects[ref.plugin_ref]))
            elif kind in PICKERS:
                pickers.append(self._objects[ref.plugin_ref])
        if len(pickers) > 1:
            raise ConfigError(f"{path}.plugins: expected at most one picker, got {len(pickers)}")
        configured = [name for name, kind in self._types.items() if kind in PICKERS]
        picker = pickers[0] if pickers else self._objects[configured[0]] if configured else MaxScorePicker()
        return Profile(spec.name, tuple(filters), tuple(scorers), picker)

    def _policy(self, profiles: Mapping[str, Profile]) -> ProfilePolicy:
        handlers = [name for name, kind in self._types.items() if kind in _HANDLERS]
        if len(handlers) > 1:
            raise ConfigError(f"plugins: expected one profile handler, got {', '.join(handlers)}")
        kind = self._types[handlers[0]] if handlers else "single-profile-handler"
        header = next(
            (p.header_name for p in self._parameters.values() if isinstance(p, schema.SessionParameters)), None
        )
        if kind == "single-profile-handler":
            if len(profiles) != 1:
                raise ConfigError(f"schedulingProfiles: single-profile-handler takes one, got {len(profiles)}")
            return ProfilePolicy(next(iter(profiles.values())), session_header=header)
        parameters = self._parameters[handlers[0]]
        if isinstance(parameters, schema.DisaggParameters):
            if parameters.profiles.encode or parameters.deciders.encode:
                raise ConfigError("disagg-profile-handler: encode profiles are not supported here")
            decode, prefill = parameters.profiles.decode, parameters.profiles.prefill
            decider_name = parameters.deciders.prefill
        else:
            decode, prefill, decider_name = "decode", "prefill", parameters.decider_plugin_name
        for name in (decode, prefill):
            if name not in profiles:
                raise ConfigError(f"schedulingProfiles: {handlers[0]!r} needs a profile called {name!r}")
        return ProfilePolicy(profiles[decode], profiles[prefill], self._decider(decider_name), session_header=header)

    def _decider(self, name: str) -> PrefixBasedDecider | AlwaysDecider | None:
        if not name:
            return None
        kind = self._types.get(name)
        if kind == "prefix-based-pd-decider":
            return PrefixBasedDecider(self._parameters[name].non_cached_tokens)
        if kind == "always-disagg-pd-decider":
            return AlwaysDecider()
        raise ConfigError(f"deciders.prefill: no decider is called {name!r}")

    def _saturation(self) -> Saturation:
        """The detector that is referred to, else a utilization-detector that is declared, else the default one."""
        ref = self._config.saturation_detector
        declared = [name for name, kind in self._types.items() if kind == "utilization-detector"]
        name = ref.plugin_ref if ref is not None else next(iter(declared), None)
        if name is None:
            return _SATURATION
        parameters = self._parameters[name]
        if isinstance(parameters, schema.UtilisationParameters):
            return Utilization(parameters.queue_depth_threshold, parameters.kv_cache_util_threshold)
        if not isinstance(parameters, schema.ConcurrencyParameters):
            raise ConfigError(f"saturationDetector.pluginRef: {name!r} is no detector, but a {self._types[name]}")
        if parameters.mode == "requests":
            return Concurrency(parameters.max_concurrency)
        if parameters.mode == "tokens":
            return Concurrency(parameters.max_token_concurrency, time.monotonic)
        raise ConfigError(f"concurrency-detector: mode: expected requests or tokens, got {parameters.mode!r}")

    def _picker_config(self, policy: ProfilePolicy) -> PickerConfig:
        options: dict[str, Any] = {}
        for name, kind in self._types.items():
            parameters = self._parameters[name]
            if kind == "approx-prefix-cache-producer":
                options["num_blocks"] = parameters.lru_capacity_per_server
            elif kind in _PRODUCERS:
                options |= _precise_options(parameters)
        config = PickerConfig(policy, saturation=self._saturation(), **options)
        for name, kind in self._types.items():
            if kind == "file-discovery":
                parameters = self._parameters[name]
                config = replace(
                    config, discovery=Discovery(self._folder / parameters.path, parameters.watch_file, config)
                )
        return config


def with_events(spec: ReplicaSpec, config: PickerConfig) -> ReplicaSpec:
    """Return the replica with its events where the configuration says that they are published."""
    if config.kv_events_port is None or spec.kv_events is not None:
        return spec
    host = spec.address.rpartition(":")[0] or spec.address
    rank = spec.rank or 0
    replay = f"tcp://{host}:{config.kv_replay_port + rank}" if config.kv_replay_port else None
    events = f"tcp://{host}:{config.kv_events_port + rank}"
    return replace(spec, kv_events=events, kv_replay=replay, topic=config.topic)


def _precise_options(parameters: schema.PreciseParameters) -> dict[str, Any]:
    events = parameters.kv_events_config
    if events.zmq_endpoint:
        raise ConfigError("kvEventsConfig.zmqEndpoint: one socket for all is not supported; use discoverPods")
    processor = parameters.token_processor_config
    index = parameters.indexer_config.kv_block_index_config
    options: dict[str, Any] = {
        "block_size": processor.block_size or processor.block_size_tokens,
        "speculative_ttl_s": _seconds(parameters.speculative_ttl, "speculativeTTL"),
        "topic": events.topic_filter,
        "kv_events_port": events.pod_discovery_config.socket_port,
        "kv_replay_port": events.pod_discovery_config.replay_socket_port,
    }
    if index and index.cost_aware_memory_config:
        options["index_bytes"] = _bytes(index.cost_aware_memory_config.size, "costAwareMemoryConfig.size")
    return options


def _convert(value: Any, kind: type[_T], path: str) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        at = _PATH.search(message)
        inner = at.group(1) if at else ""
        message = message[: at.start()] if at else message
        where = f"{path}.{inner}".strip(".") or "the file"
        raise ConfigError(f"{where}: {message[:1].lower()}{message[1:]}") from None


_POSITIVE = {
    "block_size_tokens", "block_size", "lru_capacity_per_server", "lru_size", "threshold", "queue_threshold_tokens",
    "max_num_of_endpoints", "queue_depth_threshold", "kv_cache_util_threshold",
    "max_concurrency", "max_token_concurrency",
    "match_length_scale_tokens", "peak_prefill_throughput", "socket_port",
}  # fmt: skip
_SHARES = {"affinity_threshold", "exploration_probability", "match_length_weight"}


def _check_values(parameters: msgspec.Struct, path: str) -> None:
    for field in msgspec.structs.fields(parameters):
        value = getattr(parameters, field.name)
        if field.name in _POSITIVE and value is not None and not value > 0:
            raise ConfigError(f"{path}.{field.encode_name}: expected a number above 0, got {value}")
        if field.name in _SHARES and not 0 <= value <= 1:
            raise ConfigError(f"{path}.{field.encode_name}: expected 0 to 1, got {value}")
        if field.name == "ttft_source" and value != "prefillThroughput":
            raise ConfigError(f"{path}.ttftSource: expected prefillThroughput, got {value!r}")
        if field.name == "enable_filtering" and value:
            raise ConfigError(f"{path}.enableFiltering: not supported here")
        if isinstance(value, msgspec.Struct):
            _check_values(value, f"{path}.{field.encode_name}")


def _seconds(text: str, path: str) -> float:
    match = _DURATION.fullmatch(text)
    if not match:
        raise ConfigError(f"{path}: expected a duration like 2s or 500ms, got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def _bytes(text: str, path: str) -> int:
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise ConfigError(f"{path}: expected a size like 2GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])
