"""Ray Serve's request router for engine replicas: `PrefixRouter` chooses, Ray sends.

A call names its route in its last three arguments: the id of the request, the hashes of its prompt (u64 each, packed),
and a replica if only that one will do (to stop a completion there); others refuse the call.
"""

from __future__ import annotations

from array import array
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from bifolio.cluster.kv_follower import KvFollower
from bifolio.cluster.routing_table import router_of
from bifolio.errors import MissingDependencyError


class PrefixAffinityRouter(RequestRouter):  # type: ignore[misc]
    """Prefers replicas that have the prompt's prefix cached and little work."""

    def initialize_state(self, **options: Any) -> None:
        """Called by Ray with the keyword arguments of the deployment's configuration."""
        self._router = router_of(f"{self._deployment_id.app_name}/{self._deployment_id.name}")
        self._router.request_tokens = float(options.get("request_tokens", self._router.request_tokens))
        try:
            self._follower: KvFollower | None = KvFollower(self._router)
        except MissingDependencyError:
            self._follower = None  # prompts that were routed here are still known

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The replicas that exist now."""
        super().update_replicas(replicas)
        self._router.set_replicas(replica.replica_id.to_full_id_str() for replica in replicas)
        sources = {r.replica_id.to_full_id_str(): r.replica_metadata.get("blocks", "") for r in replicas}
        self._router.set_block_sources(sources)
        if self._follower is not None:
            found = {r.replica_id.to_full_id_str(): r.replica_metadata.get("kv_events") for r in replicas}
            self._follower.set_sources({name: (pair[0], pair[1]) for name, pair in found.items() if pair})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        gone = replica_id.to_full_id_str()
        self._router.set_replicas(name for name in self._router.replicas if name != gone)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in order, each a rank of its own: Ray takes the first that accepts another request."""
        by_name = {replica.replica_id.to_full_id_str(): replica for replica in candidate_replicas}
        _, packed, only = route_of(pending_request)
        if only in by_name:
            return [[by_name[only]]]
        if only:  # it is gone: another one answers so, and no call waits for it
            return [candidate_replicas]
        hashes = array("Q", packed)
        loads = {name: self._replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        ranked = [by_name[choice.replica] for choice in self._router.rank(hashes, loads) if choice.replica in by_name]
        return [[replica] for replica in ranked] or [candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        request_id, packed, only = route_of(pending_request)
        if request_id and not only:
            self._router.begin(request_id, replica_id.to_full_id_str(), array("Q", packed))


def route_of(pending: PendingRequest | None) -> tuple[str, bytes, str]:
    """(id of the request, packed hashes, name of the only replica) of a call."""
    if pending is None or len(pending.args) < 3:
        return "", b"", ""
    request_id, packed, only = pending.args[-3:]
    return request_id, packed, only
