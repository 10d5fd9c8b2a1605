"""Routes of the OpenAI-compatible server."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tailreplay.engines.transformers import HybridLM
from tailreplay.metrics import CONTENT_TYPE, Metrics
from tailreplay.server import errors
from tailreplay.server.auth import ApiKeyMiddleware
from tailreplay.server.service import Service
from tailreplay.server.worker import Worker


def create_app(lm: HybridLM, worker: Worker, metrics: Metrics, name: str, api_key: str | None = None) -> FastAPI:
    """Return the application.

    Parameters
    ----------
    lm : HybridLM
        Its `reuse` is the default of requests that name no mode.
    worker : Worker
        Started by the caller, who also ends it.
    metrics : Metrics
        Shown at ``/metrics``.
    name : str
        The model's name in the API.
    api_key : str, optional
        Asked of every request but ``/health``.
    """
    # No schema pages: they would load scripts from elsewhere, and the API is OpenAI's.
    app = FastAPI(title="tailreplay", openapi_url=None)
    errors.install(app, metrics)
    if api_key:
        app.add_middleware(ApiKeyMiddleware, key=api_key, metrics=metrics)
    metrics.watch_cache(lm.cache.stats)
    service = Service(lm, worker, name)
    created = int(time.time())

    def card() -> dict[str, object]:
        limit = lm.backbone.max_tokens
        return {"id": name, "object": "model", "created": created, "owned_by": "tailreplay", "max_model_len": limit}

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if worker.alive else JSONResponse({"status": "closing"}, 503)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card()]})

    # A name may be a hub id or a path, with slashes.
    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        service.check_model(model)
        return JSONResponse(card())

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.complete(request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await service.chat(request)

    return app
