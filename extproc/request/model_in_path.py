# SPDX-License-Identifier: Apache-2.0
"""Paths that name the model, of the protocols V1, V2 and TensorFlow: the body of such a request is not read.

No part of a client's path reaches an engine as it came: the path is written anew from the parts that were understood,
with the engine's name of the model.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_to_bytes

from extproc.refusals import BadRequest, MethodNotAllowed, UnknownPath
from extproc.request.inference_request import InferenceRequest, ModelPath
from extproc.wire_names import EXPLAIN_VERB, MODEL_ROOTS, PATH_APIS, Api

_SHOWN_CHARACTERS: Final = 100
_VERBS: Final = sorted({verb for _, paths in PATH_APIS for verb in paths.verbs if verb}, key=len, reverse=True)
_SELECTORS: Final = sorted({selector for _, paths in PATH_APIS for selector in paths.selectors})
# The shortest name that leaves a verb behind it: names may have colons.
_PATH: Final = re.compile(
    f"({'|'.join(map(re.escape, MODEL_ROOTS))})([^/]*?)(?:/({'|'.join(_SELECTORS)})/([^/]*?))?"
    f"({'|'.join(map(re.escape, _VERBS))})?",
)
_VERSION: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def read_model_path(path: str) -> ModelPath | None:
    """The model that ``path`` names, whose characters are the bytes that the client sent; None if it is no such path.

    Raises BadRequest for a name or version that no model can have.
    """
    found = _PATH.fullmatch(path) if path.startswith(MODEL_ROOTS) else None
    if found is None or not (apis := _apis(found)):
        return None
    root, name, selector, version, verb = found.groups(default="")
    if selector and not _VERSION.fullmatch(version):
        raise BadRequest(
            f"'{version[:_SHOWN_CHARACTERS]!a}' is no version; write up to 128 letters, digits, dots, '_' and '-'."
        )
    return ModelPath(apis, root, _name(name), f"/{selector}/{version}" if selector else "", verb)


def api_of_model_path(path: str) -> Api | None:
    """The first API that has such paths, whatever the name in it; None if none has."""
    found = _PATH.fullmatch(path)
    apis = () if found is None else _apis(found)
    return apis[0] if apis else None


def _apis(found: re.Match[str]) -> tuple[Api, ...]:
    root, _, selector, _, verb = found.groups(default="")
    return tuple(
        api
        for api, paths in PATH_APIS
        if paths.root == root and verb in paths.verbs and (not selector or selector in paths.selectors)
    )


def _name(text: str) -> str:
    try:
        name = unquote_to_bytes(text.encode("latin-1")).decode()
    except UnicodeError:
        raise BadRequest("The model's name in the path is not UTF-8; write it percent-encoded.") from None
    if not name:
        raise BadRequest("The path has no model's name; write it as one segment, percent-encoded.")
    if name in {".", ".."} or "/" in name or not name.isprintable():
        shown = name[:_SHOWN_CHARACTERS]
        raise BadRequest(f"{shown!a} in the path is no model's name; write the name that a ModelRoute has.")
    return name


def check_method(path: ModelPath, method: str, shown: str, *, has_body: bool) -> None:
    """Raise MethodNotAllowed, or BadRequest for a request without the body that its verb needs."""
    (wanted,) = {paths.verbs[path.verb] for api, paths in PATH_APIS if api in path.apis}
    if method != wanted and not (wanted == "GET" and method == "HEAD"):
        raise MethodNotAllowed(f"{shown[:_SHOWN_CHARACTERS]} takes {wanted}, not {method[:20]}.")
    if wanted == "POST" and not has_body:
        raise BadRequest("The request has no body; send the inputs of the model.")


def request_by_path(path: ModelPath, protocol: str) -> InferenceRequest:
    """A request by ``path`` to engines that speak ``protocol``, one of its APIs'. It has no prompt and no tokens."""
    return InferenceRequest(
        next(api for api in path.apis if api.spec.protocol == protocol),
        path.model,
        b"",
        is_streamed=False,
        stream_options={},
        max_output_tokens=None,
        answers=0,
        path=path,
    )


def wrong_protocol_refusal(model: str, protocol: str, path: str) -> UnknownPath:
    """The refusal of a request in another protocol than that of the model's engines."""
    shown = model[:_SHOWN_CHARACTERS]
    if path.endswith(EXPLAIN_VERB):
        return UnknownPath(
            f"'{shown}' has no explainer; ask for predictions, or let a rule of its ModelRoute send"
            f" {EXPLAIN_VERB} to a ModelServer of protocol V1."
        )
    advice = "; ".join(_examples(shown, protocol)) or "name it in the body of a chat, or of what its engines serve"
    return UnknownPath(f"{path[:_SHOWN_CHARACTERS]} is not of the protocol of '{shown}', {protocol}; {advice}.")


def _examples(model: str, protocol: str) -> list[str]:
    found = [
        f"write POST {paths.root}{model}{verb}"
        for api, paths in PATH_APIS
        for verb, method in paths.verbs.items()
        if api.spec.protocol == protocol and method == "POST"
    ]
    calls = [api.spec.calls.paths[0] for api in Api if api.spec.protocol == protocol and api.spec.calls is not None]
    return [*found[:1], *(f"call {path}, whose message names it" for path in calls)]
