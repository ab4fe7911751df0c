# SPDX-License-Identifier: Apache-2.0
"""The second baseline: reads and answers as much as extproc does, but decides nothing.

An answer has four endpoints, as header and as metadata, a ticket, the length, and the whole body with the engines'
name of the model in place of the client's. What extproc costs beyond this is what deciding costs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import TYPE_CHECKING, Final

import uvloop

from bench.micro.noop import PASS_HEADERS, SERVER, serve
from bench.stack.stack import ALIAS, MODEL
from extproc.protocol import DESTINATION, LB_NAMESPACE, NAMESPACE, SERVER_HEADER, TICKET
from extproc.streams.messages import ProcessingRequest, ProcessingResponse

if TYPE_CHECKING:
    import grpc

_OVERWRITE: Final = 2  # HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_CHOICES: Final = 4
_ASKED, _RENAMED = f'"model": "{ALIAS}"'.encode(), f'"model": "{MODEL}"'.encode()


class Answering:
    """Answers with the engines in turn."""

    def __init__(self, engines: list[str]) -> None:
        lists = [",".join((engines * 2)[start : start + _CHOICES]) for start in range(len(engines))]
        self._destinations = itertools.cycle(lists)
        self._tickets = itertools.count()

    async def process(self, _: object, context: grpc.aio.ServicerContext[ProcessingRequest, bytes]) -> None:
        """Headers, the body, the end of the stream."""
        await context.read()
        await context.write(PASS_HEADERS)
        message = await context.read()
        await context.write(self._answer(message.request_body.body))
        await context.read()

    def _answer(self, body: bytes) -> bytes:
        answer = ProcessingResponse()
        common = answer.request_body.response
        common.clear_route_cache = True
        renamed = body.replace(_ASKED, _RENAMED, 1)
        common.body_mutation.body = renamed
        destination = next(self._destinations)
        headers = {SERVER_HEADER: SERVER, DESTINATION: destination, "content-length": str(len(renamed))}
        for name, value in headers.items():
            option = common.header_mutation.set_headers.add(append_action=_OVERWRITE)
            option.header.key, option.header.raw_value = name, value.encode()
        metadata = answer.dynamic_metadata.fields
        metadata[LB_NAMESPACE].struct_value.fields[DESTINATION].string_value = destination
        metadata[NAMESPACE].struct_value.fields[TICKET].string_value = f"ticket-{next(self._tickets):x}"
        return answer.SerializeToString()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.micro.answering", description=__doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--engines", required=True, help="their addresses, separated by commas")
    options = parser.parse_args()
    answering = Answering(options.engines.split(","))
    sys.exit(uvloop.run(serve(options.listen, answering.process, reads_logs=True)))
