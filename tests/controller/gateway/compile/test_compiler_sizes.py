# SPDX-License-Identifier: Apache-2.0
"""A directory that extproc would refuse for its size does not replace the one that it has."""

from __future__ import annotations

from controller.gateway.compile.compiler import Compiler, directory_size_problem
from extproc.api.config_loader import MAX_DIRECTORY_BYTES, MAX_JSON_BYTES
from tests.kube_objects import pod, server


def test_a_directory_that_is_too_large_says_whose_objects_are() -> None:
    whole = b"x" * MAX_JSON_BYTES
    files = {f"httproute.blue.r{number}.json": whole for number in range(MAX_DIRECTORY_BYTES // MAX_JSON_BYTES)}
    assert directory_size_problem(files) == ""
    assert directory_size_problem({**files, "secret.green.a_tls.key.data": b"is not read as a document"}) == ""
    said = directory_size_problem({**files, "modelroute.default.a.json": b"x"})
    assert said == (
        f"all objects come to {MAX_DIRECTORY_BYTES + 1} bytes, and {MAX_DIRECTORY_BYTES} are read; "
        f"the namespaces with most of them: blue {MAX_DIRECTORY_BYTES}, default 1"
    )


def test_pods_whose_labels_make_a_server_too_large_change_nothing_that_is_served() -> None:
    compiler = Compiler()
    compiler.update_object("ModelServer", "default/llama", server())
    huge = {f"l{number}": "v" * 60 for number in range(12_000)}
    for number in range(24):
        thing = pod(f"p{number}", f"10.0.0.{number + 1}")
        thing["metadata"]["labels"] |= huge
        compiler.update_object("Pod", f"default/p{number}", thing)
    assert compiler.compile().refused.startswith("modelserver.default.llama.json would have ")
