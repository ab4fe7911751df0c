# SPDX-License-Identifier: Apache-2.0
"""hf://: a repository of a Hugging Face hub or a mirror, pinned to a commit."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final

from controller.agents.downloader.core.errors import AccessRefused, SourceNotFound, SourceUnavailable
from controller.agents.downloader.core.fetch_plan import Checksum, FileListing, RemoteFile
from controller.agents.downloader.environment import import_optional
from controller.agents.downloader.transfer import HttpRequest, error_for_status

if TYPE_CHECKING:
    from controller.agents.downloader.core.uri import HubLocation
    from controller.agents.downloader.environment import EnvironmentReader

_PUBLIC: Final = "https://huggingface.co"
_API_TIMEOUT_S: Final = 30.0


class HubSource:
    """``HF_ENDPOINT`` names a mirror; ``HF_TOKEN`` is sent to the hub alone, and to no host that it redirects to.

    The library lists the commit and the files, with sizes and checksums. The files come through our own fetcher: the
    library's downloader keeps no ranges across a crash and does not compare checksums.
    """

    def __init__(self, place: HubLocation, environment: EnvironmentReader) -> None:
        self._place = place
        self._endpoint = (environment.get("HF_ENDPOINT") or _PUBLIC).rstrip("/")
        self._token = environment.get("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
        self._hub = import_optional("huggingface_hub", "hub")

    async def list_files(self, revision: str) -> FileListing:
        """The commit that ``revision``, or ``main``, is now."""
        info = await asyncio.to_thread(self._info, revision or "main")
        commit = str(info.sha or "")
        if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            raise SourceUnavailable(f"the hub names no commit for {self._place.repo}", is_temporary=False)
        files = [self._file(one, commit) for one in info.siblings or ()]
        return FileListing(commit, tuple(one for one in files if one is not None))

    async def build_request(self, file: RemoteFile, start: int, end: int | None) -> HttpRequest:
        """The hub redirects large files to a signed URL that expires: it is requested again for each range."""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        return HttpRequest(file.locator, headers)

    def _info(self, revision: str) -> Any:  # noqa: ANN401 - the library's ModelInfo
        api = self._hub.HfApi(endpoint=self._endpoint, token=self._token or False)
        where = f"{self._place.repo}@{revision}"
        errors = import_optional("huggingface_hub.errors", "hub")
        try:
            return api.model_info(self._place.repo, revision=revision, files_metadata=True, timeout=_API_TIMEOUT_S)
        except errors.GatedRepoError as error:
            raise AccessRefused(f"{where} is gated: accept its terms, and put HF_TOKEN into a Secret") from error
        except errors.RevisionNotFoundError as error:
            raise SourceNotFound(f"{self._place.repo} has no revision {revision!r}") from error
        except errors.RepositoryNotFoundError as error:
            raise SourceNotFound(f"the hub has no {self._place.repo}, or none for this token") from error
        except errors.HfHubHTTPError as error:
            status = getattr(error.response, "status_code", 0)
            raise error_for_status(
                status, f"{self._endpoint} ({where})", error.response.headers.get("retry-after")
            ) from error
        except Exception as error:
            raise SourceUnavailable(f"{self._endpoint} does not answer: {type(error).__name__}") from error

    def _file(self, sibling: Any, commit: str) -> RemoteFile | None:  # noqa: ANN401 - the library's RepoSibling
        name = str(sibling.rfilename)
        path = name
        if self._place.path:
            if name == self._place.path:
                path = name.rpartition("/")[2]
            elif name.startswith(f"{self._place.path}/"):
                path = name.removeprefix(f"{self._place.path}/")
            else:
                return None
        checksum = None
        if sibling.lfs is not None:
            checksum = Checksum("sha256", sibling.lfs.sha256)
        elif sibling.blob_id:
            checksum = Checksum("git-sha1", sibling.blob_id)
        url = self._hub.hf_hub_url(self._place.repo, name, revision=commit, endpoint=self._endpoint)
        return RemoteFile(path, sibling.size, url, checksum)
