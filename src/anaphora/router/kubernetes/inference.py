"""Objectives and model rewrites of a cluster, in force as they are there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from anaphora.router.kubernetes.reflector import Reflector
from anaphora.router.resource_file import OBJECTIVE_GROUPS
from anaphora.router.resources import InferenceModelRewrite, InferenceObjective

if TYPE_CHECKING:
    from anaphora.router.admission import Admission
    from anaphora.router.kubernetes.api import ApiServer
    from anaphora.router.kubernetes.pool import PoolName
    from anaphora.router.rewrites import ModelRewrites

_R = TypeVar("_R", InferenceObjective, InferenceModelRewrite)


class InferenceResources:
    """Follows both kinds in both groups that define them. Those for other pools count for nothing here."""

    def __init__(self, api: ApiServer, pool: PoolName, admission: Admission, rewrites: ModelRewrites) -> None:
        self._api = api
        self._pool = pool
        self._admission = admission
        self._rewrites = rewrites

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name in OBJECTIVE_GROUPS:  # in this order: the first source's objective counts
                self._admission.set(name, ())
                group.create_task(self._objectives(name).run())
                group.create_task(self._model_rewrites(name).run())

    def _path(self, group: str, plural: str) -> str:
        return f"/apis/{group}/v1alpha2/namespaces/{self._pool.namespace}/{plural}"

    def _objectives(self, group: str) -> Reflector[InferenceObjective]:
        def use() -> None:
            self._admission.set(group, _of_pool(table.objects, self._pool.name))

        table = Reflector(self._api, self._path(group, "inferenceobjectives"), InferenceObjective, use)
        return table

    def _model_rewrites(self, group: str) -> Reflector[InferenceModelRewrite]:
        def use() -> None:
            self._rewrites.set(group, _of_pool(table.objects, self._pool.name))

        table = Reflector(self._api, self._path(group, "inferencemodelrewrites"), InferenceModelRewrite, use)
        return table


def _of_pool(objects: dict[str, _R], pool: str) -> list[_R]:
    return [objects[name] for name in sorted(objects) if objects[name].spec.pool_ref.name == pool]
