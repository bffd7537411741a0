"""Where partitions start and end, as their leaders say it.

One request is in flight and one is gathering: a question shares only a request that had not been sent when it came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaException, TopicPartition

from tidebook.core.errors import NotFound, TidebookError
from tidebook.log.kafka.client import new_consumer
from tidebook.log.kafka.faults import PASSING, failed, kafka_error
from tidebook.log.kafka.settings import KafkaSettings

Which = Literal["start", "end"]
#: A topic, a partition, and which of its ends.
Question = tuple[str, int, Which]

_LOOK_AGAIN_S = 0.02


class Offsets:
    """Questions of one process, asked by one client in its own thread."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._timeout_s = settings.request_timeout_ms / 1000
        self._thread = ThreadPoolExecutor(1, "tidebook-kafka-offsets")
        self._client: Consumer | None = None
        self._gathering: dict[Question, asyncio.Future[int]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def ask(self, topic: str, partition: int, which: Which) -> int:
        """The offset as it is now: the leader is asked after this call has begun."""
        question = (topic, partition, which)
        answer = self._gathering.get(question)
        if answer is None:
            answer = self._gathering[question] = asyncio.get_running_loop().create_future()
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask_all())
        return await asyncio.shield(answer)

    async def _ask_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._gathering:
            asked, self._gathering = self._gathering, {}
            found: Mapping[Question, int | BaseException]
            try:
                found = await loop.run_in_executor(self._thread, self._ask, list(asked))
            except BaseException as error:  # whatever it is, whoever asked must hear it
                found = dict.fromkeys(asked, error)
            for question, answer in asked.items():
                _settle(answer, found[question])
        self._asking = None

    async def close(self) -> None:
        """Let go of the client."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    # ---- in the thread

    def _ask(self, questions: list[Question]) -> dict[Question, int | TidebookError]:
        """The starts in one request, the ends in another; those whose leader is just moving are asked again."""
        answers: dict[Question, int | TidebookError] = {}
        deadline = time.monotonic() + self._timeout_s
        while questions:
            again = []
            for which in ("start", "end"):
                of_kind = [question for question in questions if question[2] == which]
                again += self._ask_kind(of_kind, answers, deadline) if of_kind else []
            questions = again
            if questions:
                time.sleep(_LOOK_AGAIN_S)
        if any(isinstance(answer, NotFound) for answer in answers.values()):
            self._close()  # a client may hold on to that, however long the topic has been there again
        return answers

    def _ask_kind(
        self, questions: list[Question], answers: dict[Question, int | TidebookError], deadline: float
    ) -> list[Question]:
        offset = OFFSET_BEGINNING if questions[0][2] == "start" else OFFSET_END
        by_place = {(topic, partition): (topic, partition, which) for topic, partition, which in questions}
        again = []
        try:
            found = self._connected().offsets_for_times(
                [TopicPartition(topic, partition, offset) for topic, partition in by_place],
                timeout=max(0.1, deadline - time.monotonic()),
            )
        except KafkaException as error:
            if kafka_error(error).code() in PASSING and time.monotonic() < deadline:
                return questions
            answers.update({q: failed(error, f"asking for the {q[2]} of {q[0]}/{q[1]}") for q in questions})
            return []
        for each in found:
            question = by_place[each.topic, each.partition]
            if each.error is None:
                answers[question] = each.offset
            elif each.error.code() in PASSING and time.monotonic() < deadline:
                again.append(question)
            else:
                answers[question] = failed(each.error, f"asking for the {question[2]} of {each.topic}/{each.partition}")
        return again

    def _connected(self) -> Consumer:
        if self._client is None:
            self._client = new_consumer(self._settings, fetch_wait_ms=5)
        return self._client

    def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _settle(answer: asyncio.Future[int], result: int | BaseException) -> None:
    if answer.done():
        return
    if isinstance(result, BaseException):
        answer.set_exception(result)
        answer.exception()  # whoever asked may be gone
    else:
        answer.set_result(result)
