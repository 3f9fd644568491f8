"""A server on this machine that speaks the part of the Hugging Face Hub's protocol that torchcaps uses.

Repositories, branches, commits and large files are kept in memory. A file whose name ends in .safetensors is uploaded
as the Hub takes large files (git-lfs), any other one within the commit.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

USER, TOKEN = "somebody", "hf_a_token_for_tests"
EMPTY = "0" * 40


@dataclass
class Repository:
    private: bool
    branches: dict[str, str] = field(default_factory=lambda: {"main": EMPTY})
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {EMPTY: {}})

    def commit_of(self, revision: str) -> str | None:
        found = self.branches.get(revision, revision)
        return found if found in self.commits else None


@dataclass
class Hub:
    """What the server has: repositories by name, and large files by their SHA-256."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def put(self, name: str, **files: bytes) -> None:
        """Make a repository with files, whose names have _ for the dot."""
        repository = self.repositories[name] = Repository(private=False)
        repository.commits["1" * 40] = {key.replace("_", "."): content for key, content in files.items()}
        repository.branches["main"] = "1" * 40


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer_to("HEAD")

    def do_GET(self) -> None:
        self._answer_to("GET")

    def do_POST(self) -> None:
        self._answer_to("POST")

    def do_PUT(self) -> None:
        self._answer_to("PUT")

    def _answer_to(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{method} {path}")
        for pattern, answer in ROUTES:
            if found := re.fullmatch(pattern, f"{method} {path}"):
                answer(self, *found.groups())
                return
        self._send({"error": f"no such page {path}"}, 404)

    def _send(self, content: Any, status: int = 200, **headers: str) -> None:
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    @property
    def _may_write(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self._may_write):
            self._send({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            return None
        return found

    def _commit(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self._repository(name)
        commit = repository.commit_of(revision) if repository else None
        if repository and commit is None:
            self._send({"error": "Revision not found"}, 404, X_Error_Code="RevisionNotFound")
        return (commit, repository.commits[commit]) if repository and commit else None

    def create(self) -> None:
        if not self._may_write:
            self._send({"error": "Invalid username or password."}, 401)
            return
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        private = asked.get("private") or asked.get("visibility") == "private"
        status = 409 if name in self.hub.repositories else 200
        self.hub.repositories.setdefault(name, Repository(bool(private)))
        self._send({"url": f"{self.hub.address}/{name}", "name": name}, status)

    def branch(self, name: str, branch: str) -> None:
        if repository := self._repository(name):
            status = 409 if branch in repository.branches else 200
            repository.branches.setdefault(branch, repository.branches["main"])
            self._send({}, status)

    def validate(self) -> None:
        self._send({"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        files = json.loads(self.body)["files"]
        modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in files}
        self._send({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})

    def batch(self, name: str) -> None:
        objects = json.loads(self.body)["objects"]
        upload = {o["oid"]: {"upload": {"href": f"{self.hub.address}/large/{o['oid']}"}} for o in objects}
        self._send({"transfer": "basic", "objects": [{**o, "actions": upload[o["oid"]]} for o in objects]})

    def store(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.large[oid] = self.body
        self._send({})

    def commit(self, name: str, revision: str) -> None:
        if not self._may_write:
            self._send({"error": "Forbidden"}, 403)
            return
        if not (found := self._commit(name, revision)):
            return
        files = dict(found[1])
        for line in map(json.loads, self.body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            if line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.hub.large[line["value"]["oid"]]
        oid = hashlib.sha1(repr((found[0], files)).encode()).hexdigest()
        repository = self.hub.repositories[name]
        repository.commits[oid] = files
        repository.branches[revision] = oid
        self._send({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.address}/{name}/commit/{oid}"})

    def info(self, name: str, revision: str = "main") -> None:
        if found := self._commit(name, revision):
            siblings = [{"rfilename": path} for path in found[1]]
            self._send({"id": name, "sha": found[0], "private": False, "tags": [], "siblings": siblings})

    def tree(self, name: str, revision: str) -> None:
        if found := self._commit(name, revision):
            sizes = {path: (len(content), hashlib.sha1(content).hexdigest()) for path, content in found[1].items()}
            self._send([{"type": "file", "path": p, "size": size, "oid": oid} for p, (size, oid) in sizes.items()])

    def resolve(self, name: str, revision: str, path: str) -> None:
        if found := self._commit(name, revision):
            if path not in found[1]:
                self._send({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
                return
            content = found[1][path]
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self._send(content, ETag=etag, X_Repo_Commit=found[0], Accept_Ranges="bytes")


ROUTES = (
    (r"POST /api/repos/create", _Handler.create),
    (r"POST /api/validate-yaml", _Handler.validate),
    (r"POST /api/models/([^/]+/[^/]+)/branch/(.+)", _Handler.branch),
    (r"POST /api/models/([^/]+/[^/]+)/preupload/(.+)", _Handler.preupload),
    (r"POST /api/models/([^/]+/[^/]+)/commit/(.+)", _Handler.commit),
    (r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch", _Handler.batch),
    (r"PUT /large/(\w+)", _Handler.store),
    (r"GET /api/models/([^/]+/[^/]+)/revision/(.+)", _Handler.info),
    (r"GET /api/models/([^/]+/[^/]+)", _Handler.info),
    (r"GET /api/models/([^/]+/[^/]+)/tree/(.+)", _Handler.tree),
    (r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/([^/]+)/(.+)", _Handler.resolve),
)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a server within this context."""
    hub = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})) as server:
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
