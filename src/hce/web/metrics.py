"""/metrics: requests, their times and the state of the index, in the text form of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hce.errors import HceError, needs_extra
from hce.web.api import NO_STORE, ServedIndex

with needs_extra("web", "hce serve without --no-metrics"):
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
    from prometheus_client.core import GaugeMetricFamily

TEXT = "text/plain; version=0.0.4; charset=utf-8"
VERDICTS = ("ok", "re-cluster", "retrain", "unknown")
DRIFT_SECONDS = 600.0  # at least, between two measurements for a monitor
GONE = "499"  # as in nginx: the client left before there was an answer
NO_ROUTE = "none"  # of a path that does not exist, or a request that the guard refused


class Metrics:
    """The numbers of one server, collected for each request to /metrics."""

    def __init__(self, site: ServedIndex) -> None:
        self._site = site
        self._registry = CollectorRegistry()
        self.requests = Counter("hce_requests", "Answers.", ["route", "code"], registry=self._registry)
        self.seconds = Histogram("hce_request_seconds", "Seconds to answer.", ["route"], registry=self._registry)
        self._registry.register(self)

    def text(self) -> bytes:
        """Return all of it as Prometheus reads it."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the state of the index; a store that cannot be read shows as down."""
        try:
            found = [*self._of_index()]
        except HceError:
            found = []
        yield GaugeMetricFamily("hce_up", "1 if the store can be read.", value=float(bool(found)))
        yield from found
        verdict = GaugeMetricFamily("hce_drift", "1 for the last verdict on the drift.", labels=["verdict"])
        last = self._site.drift.now(DRIFT_SECONDS).verdict if found else "unknown"
        for each in VERDICTS:
            verdict.add_metric([each], float(each == last))
        yield verdict

    def _of_index(self) -> Iterator[GaugeMetricFamily]:
        part = self._site.index.state.derived.engine_part
        with self._site.index.state.reading() as reader:
            documents, pending, saved = reader.moment().documents, part.pending(reader), part.facts(reader)
        yield GaugeMetricFamily("hce_documents", "Documents in the index.", documents)
        yield GaugeMetricFamily("hce_pending_changes", "Changes that are not in the engine's snapshot.", pending)
        if "written" in saved:
            age = time.time() - saved["written"]
            yield GaugeMetricFamily("hce_snapshot_age_seconds", "Seconds since the engine's last snapshot.", age)


class Metered:
    """ASGI middleware: counts and times each request, including those that the guard refuses."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        code, start = GONE, time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            # The template of the route, never the path: a monitor keeps each label for good.
            found: Any = scope.get("route")
            route = getattr(found, "path", "") or scope.get("root_path") or NO_ROUTE  # root_path: of mounted files
            self._metrics.requests.labels(route, code).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - start)


def add_metrics(app: FastAPI, site: ServedIndex) -> None:
    """Count requests, outside all other middleware, and answer at /metrics."""
    metrics = Metrics(site)
    app.add_middleware(Metered, metrics=metrics)

    @app.get("/metrics", include_in_schema=False)
    async def numbers() -> Response:
        return Response(await site.looks.run(metrics.text), headers=NO_STORE, media_type=TEXT)
