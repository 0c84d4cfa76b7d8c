"""The API's endpoints: read a request, open an exchange, answer streamed or whole.

Runs on the gateway's event loop; what costs time in proportion to the body goes to a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from transom.errors import (
    CancelledRequestError,
    NotFoundError,
    TransomError,
    UnavailableError,
)
from transom.gateway.admission import Admission
from transom.gateway.body_work import BodyWork
from transom.gateway.config import GatewayConfig
from transom.gateway.exchange import Attachment, Dispatcher, Exchange, Plan, spread_seed, total_tokens
from transom.gateway.grammar import answer_grammar
from transom.gateway.http_body import Body, read_body
from transom.gateway.http_edge import (
    api_key,
    cors_headers,
    error_response,
    json_response,
    limit_headers,
)
from transom.gateway.media_embeddings import MediaEmbeddings
from transom.gateway.media_totals import MediaLimits
from transom.gateway.metrics import Endpoint, GatewayMetrics
from transom.gateway.openapi import document
from transom.gateway.output import ChoiceOutput, Delta
from transom.gateway.parse import parse_chat, parse_completion
from transom.gateway.prepare import Model, chat_output, fit_context
from transom.gateway.prompt import Prompt
from transom.gateway.quota import Quotas
from transom.gateway.reasoning_parser import ReasoningParser
from transom.gateway.responses import ChatRenderer, CompletionRenderer, Head, Renderer, usage
from transom.gateway.schema import ChatRequest, CompletionRequest, Generation, Limits
from transom.gateway.sse import EventStream
from transom.gateway.telemetry import Observed, Telemetry
from transom.gateway.timeline import Timeline
from transom.gateway.trace import MAX_NOTES, Trace, TraceBook
from transom.grammar import GrammarCompiler
from transom.messages import Grammar, PromptStats

logger = logging.getLogger(__name__)
T = TypeVar("T")


_DELTA_BYTES = 300  # of a piece of an answer (CPython 3.11)


def shutting_down() -> UnavailableError:
    """Return what a request gets that comes too late."""
    return UnavailableError("the gateway is shutting down", retry_after_s=5)


@dataclass(slots=True)
class Job:
    """A client request that is ready to be sent out. `prompt_of` maps choices to distinct prompts."""

    kind: Endpoint
    head: Head
    generation: Generation
    plans: list[Plan]
    outputs: list[ChoiceOutput]
    renderer: Renderer
    attachments: Sequence[Attachment] = ()
    prompt_of: list[int] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)


class Handlers:
    """Owned by the gateway stage. `draining` refuses new work."""

    def __init__(
        self,
        config: GatewayConfig,
        model: Model,
        dispatcher: Dispatcher,
        admission: Admission,
        quotas: Quotas,
        metrics: GatewayMetrics,
        traces: TraceBook,
        telemetry: Telemetry,
        show_fleet: Callable[[], dict[str, Any]],
        grammars: GrammarCompiler,
    ) -> None:
        self._config = config
        self._model = model
        self._dispatcher = dispatcher
        self._admission = admission
        self._quotas = quotas
        self._metrics = metrics
        self._traces = traces
        self._telemetry = telemetry
        self._show_fleet = show_fleet
        self._document = document(
            model.limits, max_body_bytes=config.max_body_mb * 1024 * 1024, keys=bool(config.api_keys_file)
        )
        self._grammars = grammars
        self._media_limits = MediaLimits.of(config)
        self._work = BodyWork()
        self._created = int(time.time())
        self.draining = False
        self.media_embeddings = MediaEmbeddings(
            config=config,
            model=model,
            dispatcher=dispatcher,
            admission=admission,
            metrics=metrics,
            telemetry=telemetry,
            work=self._work,
            read_body=self._body,
            check_model=self._check_model,
            is_draining=lambda: self.draining,
        ).answer

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._generate(request, "chat", parse_chat, self._chat_job)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._generate(request, "completion", parse_completion, self._completion_job)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models."""
        return json_response({"object": "list", "data": [self._card(name) for name in self._model.names]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models/{id}."""
        return json_response(self._card(self._check_model(request.match_info["id"])))

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /tokenize: the ids of a prompt or of chat messages; media items stand as single pads."""
        caller = api_key().caller
        with self._admission.buffer(caller) as grow:
            body = await self._body(request, grow)
            name, asked = await self._work.parse(caller, len(body), lambda: self._model.parse_tokenize(body))
            ids = await self._work.build(len(body), lambda: self._model.tokenize(asked))
        self._check_model(name)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": self._model.max_context})

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /detokenize."""
        caller = api_key().caller
        with self._admission.buffer(caller) as grow:
            body = await self._body(request, grow)
            name, text = await self._work.parse(caller, len(body), lambda: self._model.detokenize(body))
        self._check_model(name)
        return json_response({"prompt": text})

    async def trace(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/requests/{id}/trace."""
        return json_response(self._traces.find(request.match_info["id"], api_key().digest))

    async def fleet(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/fleet."""
        return json_response(self._show_fleet())

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        """GET /openapi.json."""
        return json_response(self._document)

    def _card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "transom",
            "max_model_len": self._model.max_context,
            "modalities": ["text", *dict.fromkeys(self._model.info.pads.values())],
        }

    def _check_model(self, name: str | None) -> str:
        """Return the served name; clients that leave it out get the main one."""
        names = self._model.names
        if name is None:
            return names[0]
        if name not in names:
            raise NotFoundError(
                f"model {name[:100]!r} is not served here, {', '.join(names)} is", param="model"
            )
        return name

    async def _body(self, request: web.Request, grow: Callable[[int], None]) -> Body:
        return await read_body(
            request,
            limit_bytes=self._config.max_body_mb * 1024 * 1024,
            timeout_s=self._config.body_timeout_s,
            grow=grow,
        )

    async def _generate(
        self,
        request: web.Request,
        endpoint: Endpoint,
        parse: Callable[[Body, Limits], T],
        make_job: Callable[[T, Timeline], Job],
    ) -> web.StreamResponse:
        timeline = Timeline()
        caller = api_key().caller
        async with AsyncExitStack() as stack:
            observed = stack.enter_context(self._telemetry.request(request.headers, request.path, timeline))
            stack.enter_context(self._metrics.request(endpoint, timeline))
            if self.draining:
                raise shutting_down()
            with self._admission.buffer(caller) as grow:
                body = await self._body(request, grow)
                timeline.mark("body")
                parsed = await self._work.parse(caller, len(body), lambda: parse(body, self._model.limits))
                timeline.mark("parse")
                job = await self._work.build(len(body), lambda: make_job(parsed, timeline))
                timeline.mark("prepare")
                generation = job.generation
                tokens = total_tokens(job.plans, job.attachments)
                await stack.enter_async_context(self._admission.admit(caller, len(job.plans), tokens))
                timeline.mark("admit")
                if job.plans[0].grammar is not None:  # of all choices the same
                    await self._grammars.matcher(job.plans[0].grammar)
                    timeline.mark("compile")
                exchange = stack.enter_context(
                    self._dispatcher.open(
                        job.head.id,
                        job.plans,
                        job.attachments,
                        timeout_s=generation.timeout_s or self._config.request_timeout_s,
                        cache_salt=generation.cache_salt,
                        priority=generation.priority,
                    )
                )
                params = [one.item.param for one in job.attachments]
                exchange.bound_media(self._media_limits, params)
                timeline.mark("send")
            try:
                return await self._observed(request, job, exchange, observed)
            except CancelledRequestError:
                raise
            except TransomError as error:
                return error_response(error.info(), job.head.id)

    async def _observed(
        self, request: web.Request, job: Job, exchange: Exchange, observed: Observed
    ) -> web.StreamResponse:
        """Answer; keep the trace, count what came of it and write its line in the log."""
        timeline = job.timeline
        trace = Trace(
            id=job.head.id,
            kind=job.kind,
            model=job.head.model,
            owner=api_key().digest,
            timeline=timeline,
            exchange=exchange,
            outputs=job.outputs,
            usage=lambda: self._usage(job, exchange),
        )
        observed.show = partial(self._traces.show, trace)
        with self._traces.record(trace):
            try:
                if job.generation.stream:
                    return await self._stream(request, job, exchange)
                return await self._whole(job, exchange)
            except TransomError as error:
                timeline.settle(error.status, error.code)
                raise
            except asyncio.CancelledError:
                timeline.settle(499, CancelledRequestError.code)
                raise
            finally:
                failed = next((one.error for one in exchange.choices if one.error is not None), None)
                if failed is not None:
                    timeline.settle(failed.status, failed.code)
                timeline.end()
                self._metrics.answered(timeline, exchange, job.outputs, self._stats(job, exchange))
                timeline.log(job.kind, job.head.id, exchange, job.outputs)

    async def _whole(self, job: Job, exchange: Exchange) -> web.StreamResponse:
        deltas: list[list[Delta]] = [[] for _ in job.plans]
        logprob_bytes = 0
        with self._admission.buffer(api_key().caller) as grow:
            while not all(output.ended() for output in job.outputs):
                await exchange.wait()
                for number, delta in self._news(job, exchange):
                    deltas[number].append(delta)
                    logprob_bytes += delta.logprob_bytes
                    grow(_DELTA_BYTES + len(delta.content) + len(delta.reasoning) + delta.logprob_bytes)
            reasons = [output.finish_reason or "" for output in job.outputs]
            used, headers = self._usage(job, exchange), {"X-Request-Id": job.head.id}
            # With twenty alternatives of each token there can be millions of them.
            return await self._work.build(
                logprob_bytes,
                lambda: json_response(job.renderer.whole(deltas, reasons, used), headers=headers),
            )

    async def _stream(self, request: web.Request, job: Job, exchange: Exchange) -> web.StreamResponse:
        stream = EventStream(
            request,
            keepalive_s=self._config.keepalive_s,
            write_timeout_s=self._config.write_timeout_s,
            headers={
                "X-Request-Id": job.head.id,
                **cors_headers(request, self._config.cors_origins),
                **limit_headers(request, self._quotas),
            },
        )
        exchange.bound_unread(self._config.max_unread_kb * 1024, stream.hang_up)
        renderer = job.renderer
        try:
            while not all(output.ended() for output in job.outputs):
                if not await exchange.wait(stream.idle_s()):
                    await stream.keep_alive()
                    continue
                events = []
                for number, delta in self._news(job, exchange):
                    events += renderer.events(number, delta, job.outputs[number].finish_reason)
                if job.generation.continuous_usage:
                    so_far = self._usage(job, exchange)
                    for event in events:
                        event["usage"] = so_far
                await stream.send(events)
            if job.generation.include_usage:
                await stream.send([renderer.last_event(self._usage(job, exchange))])
        except CancelledRequestError:
            raise
        except TransomError as error:
            if not stream.started:
                raise
            # The status is out already: clients find the error in the stream.
            exchange.end_reason = error.code
            job.timeline.settle(error.status, error.code)
            # What was used until now comes first: clients read no further than the error.
            usage_event = (
                [renderer.last_event(self._usage(job, exchange))] if job.generation.include_usage else []
            )
            await stream.send([*usage_event, error.info().to_openai()])
        return await stream.finish()

    def _news(self, job: Job, exchange: Exchange) -> list[tuple[int, Delta]]:
        """Take what has come; a choice that the gateway itself ends is ended in the fleet at once."""
        news = []
        for number, chunks in exchange.take():
            output = job.outputs[number]
            if output.ended():
                continue
            job.timeline.first_token()
            delta = Delta()
            for chunk in chunks:
                delta.add(output.push(chunk))
            if output.ended() and output.by_gateway:
                exchange.choices[number].close(self._dispatcher.abort, "stop")
            news.append((number, delta))
        return news

    def _usage(self, job: Job, exchange: Exchange) -> dict[str, object]:
        # All choices of a prompt with media have the same items.
        items = exchange.choices[0].encode_done if exchange.choices else {}
        notes = [(item, note) for item, done in sorted(items.items()) for note in done.notes[:MAX_NOTES]]
        return usage(self._stats(job, exchange), job.outputs, notes)

    def _stats(self, job: Job, exchange: Exchange) -> list[PromptStats]:
        """Return the figures of each distinct prompt that is known by now."""
        stats: dict[int, PromptStats] = {}
        for number, live in enumerate(exchange.choices):
            if live.stats is not None:
                stats.setdefault(job.prompt_of[number], live.stats)
        return list(stats.values())

    def _chat_job(self, request: ChatRequest, timeline: Timeline) -> Job:
        name = self._check_model(request.generation.model)
        prompt = self._model.builder.chat(request)
        return self._job(f"chatcmpl-{uuid.uuid4().hex}", name, request, prompt, timeline)

    def _completion_job(self, request: CompletionRequest, timeline: Timeline) -> Job:
        generation = request.generation
        name = self._check_model(generation.model)
        prompts = [self._model.builder.completion(one) for one in request.prompts]
        head = Head(f"cmpl-{uuid.uuid4().hex}", int(time.time()), name)
        echoes = None
        if request.echo:
            texts = [
                one if isinstance(one, str) else self._model.tokenizer.decode(one, skip_special=False)
                for one in request.prompts
            ]
            echoes = [text for text in texts for _ in range(generation.n)]
        renderer = CompletionRenderer(
            head,
            self._model.tokenizer,
            include_usage=generation.include_usage,
            logprobs=generation.sampling.top_logprobs is not None,
            echoes=echoes,
        )
        plans, prompt_of = self._plans(generation, prompts, "prompt")
        outputs = [
            ChoiceOutput(
                self._model.tokenizer, stop=generation.stop, min_tokens=generation.sampling.min_tokens
            )
            for _ in plans
        ]
        return Job("completion", head, generation, plans, outputs, renderer, (), prompt_of, timeline)

    def _job(self, id: str, name: str, request: ChatRequest, prompt: Prompt, timeline: Timeline) -> Job:
        generation = request.generation
        head = Head(id, int(time.time()), name)
        renderer = ChatRenderer(
            head,
            self._model.tokenizer,
            include_usage=generation.include_usage,
            logprobs=generation.sampling.top_logprobs is not None,
        )
        grammar = answer_grammar(request, prompt, self._model.tokenizer)
        plans, prompt_of = self._plans(generation, [prompt], "messages", grammar)
        outputs = [
            chat_output(self._model.tokenizer, request, ReasoningParser(inside=plan.prompt.inside_reasoning),
                        plan.prompt.forced)
            for plan in plans
        ]  # fmt: skip
        attachments = [Attachment(item, item.routing_key()) for item in request.media]
        return Job("chat", head, generation, plans, outputs, renderer, attachments, prompt_of, timeline)

    def _plans(
        self, generation: Generation, prompts: list[Prompt], param: str, grammar: Grammar | None = None
    ) -> tuple[list[Plan], list[int]]:
        plans, prompt_of = [], []
        for number, prompt in enumerate(prompts):
            limit = fit_context(prompt, generation, self._model.max_context, param)
            sampling = msgspec.structs.replace(generation.sampling, max_tokens=limit)
            for choice in range(generation.n):
                plans.append(Plan(prompt, spread_seed(sampling, choice), grammar))
                prompt_of.append(number)
        return plans, prompt_of
