"""A local server that speaks as much of the Hub's HTTP API as the real `huggingface_hub` client needs to publish and
load models: create, branch, commit (plain and LFS files), download, revisions; with tokens, and faults on demand.

The client finds it through `HF_ENDPOINT`, with `HF_HUB_DISABLE_XET=1`: Xet's storage protocol is not spoken here.
"""

import base64
import fnmatch
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_PATTERNS = ("*.safetensors", "*.bin")


@dataclass
class Repo:
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by its id: path -> content
    messages: dict[str, str] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # branch or refs/pr/N -> commit

    def commit(self, ref: str, files: dict[str, bytes], message: str) -> str:
        contents = {path: hashlib.sha1(content).hexdigest() for path, content in sorted(files.items())}
        text = json.dumps([ref, len(self.commits), contents, message])
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha], self.messages[sha], self.refs[ref] = files, message, sha
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.refs.get(revision, revision)]


class HubServer:
    """Runs in a thread; use as a context manager.

    Attributes:
        url: for `HF_ENDPOINT`.
        repos: what is published, by id.
        expired: tokens that are refused.
        cut_uploads: so many LFS uploads are cut in the middle.
        cut_commits: so many commits are cut before anything is written.
    """

    def __init__(self, owner: str = "me"):
        self.owner = owner
        self.lock = threading.RLock()
        self.clear()
        handler = type("Bound", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def clear(self) -> None:
        """Forget all that is published and asked for."""
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.expired: set[str] = set()
        self.cut_uploads = self.cut_commits = 0
        self.requests: list[str] = []

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_error) -> None:
        self.server.shutdown()
        self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args) -> None:
        pass

    def do_GET(self) -> None:
        self.route("GET")

    def do_HEAD(self) -> None:
        self.route("HEAD")

    def do_POST(self) -> None:
        self.route("POST")

    def do_PUT(self) -> None:
        self.route("PUT")

    def route(self, method: str) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        self.query = urlsplit(self.path).query
        with hub.lock:
            hub.requests.append(f"{method} {path}")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if path.startswith("/lfs/"):  # storage, which signed addresses lead to
            self.store(path.removeprefix("/lfs/"))
        elif token in hub.expired:
            self.fail(401, "Invalid credentials: the token is expired", None)
        elif method in ("GET", "HEAD") and path.startswith("/api/models/"):
            self.read(path.removeprefix("/api/models/"), token)
        elif method in ("GET", "HEAD"):
            self.download(path[1:], token)
        elif not token:
            self.fail(401, "Invalid username or password.", None)
        elif path == "/api/repos/create":
            self.create(self.json())
        elif path == "/api/validate-yaml":
            self.answer(200, self.validated(self.json()))
        elif path.endswith("/info/lfs/objects/batch"):
            self.batch(self.json())
        else:
            self.write(path.removeprefix("/api/models/"))

    # What is written

    def create(self, wanted: dict[str, Any]) -> None:
        owner, name = wanted.get("organization") or self.hub.owner, wanted["name"]
        repo_id = f"{owner}/{name}"
        if owner != self.hub.owner:
            self.fail(403, f"You don't have the rights to create a model under the namespace {owner!r}", None)
        elif repo_id in self.hub.repos:
            self.answer(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{repo_id}"})
        else:
            repo = self.hub.repos[repo_id] = Repo(private=wanted.get("visibility") == "private")
            repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
            self.answer(200, {"url": f"{self.hub.url}/{repo_id}", "name": repo_id})

    def write(self, path: str) -> None:
        owner, name, action, *rest = path.split("/", 3)
        revision = unquote(rest[0]) if rest else "main"
        repo = self.hub.repos.get(f"{owner}/{name}")
        body = self.body()
        if repo is None:
            self.fail(404, "Repository not found", "RepoNotFound")
        elif action == "branch":
            if revision in repo.refs:
                self.answer(409, {"error": "Reference already exists"})
            else:
                repo.refs[revision] = repo.refs["main"]
                self.answer(200, {})
        elif revision not in repo.refs:
            self.fail(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        elif action == "preupload":
            held = repo.files(revision)
            self.answer(200, {"files": [self.upload_mode(file, held) for file in json.loads(body)["files"]]})
        elif action == "commit":
            self.commit(f"{owner}/{name}", repo, revision, body)
        else:
            self.fail(404, f"this server does not know {self.path}", None)

    @staticmethod
    def upload_mode(file: dict[str, Any], held: dict[str, bytes]) -> dict[str, Any]:
        lfs = any(fnmatch.fnmatch(file["path"], pattern) for pattern in LFS_PATTERNS)
        known = {}
        if file["path"] in held:
            content = held[file["path"]]
            git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            known["oid"] = hashlib.sha256(content).hexdigest() if lfs else git
        return {
            "path": file["path"],
            "uploadMode": "lfs" if lfs else "regular",
            "shouldIgnore": False,
            "shouldTruncate": False,
        } | known

    def batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for item in wanted["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.objects:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}
            objects.append(entry)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        size = int(self.headers["Content-Length"])
        with self.hub.lock:
            cut = self.hub.cut_uploads > 0
            self.hub.cut_uploads -= cut
        if cut:
            self.rfile.read(size // 2)
            self.hang_up()
            return
        content = self.rfile.read(size)
        if hashlib.sha256(content).hexdigest() != oid:
            self.fail(400, "The content is not what its digest says", None)
            return
        self.hub.objects[oid] = content
        self.answer(200, {})

    def commit(self, repo_id: str, repo: Repo, revision: str, body: bytes) -> None:
        with self.hub.lock:
            cut = self.hub.cut_commits > 0
            self.hub.cut_commits -= cut
        if cut:
            self.hang_up()
            return
        files = dict(repo.files(revision))
        message = ""
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
                if value.get("parentCommit") not in (None, repo.refs[revision]):
                    self.fail(412, "A commit has happened since. Please refresh and try again.", None)
                    return
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
            else:
                self.fail(400, f"this server does not know {entry['key']}", None)
                return
        pull_request = None
        if "create_pr=1" in self.query:
            number = 1 + sum(ref.startswith("refs/pr/") for ref in repo.refs)
            revision = f"refs/pr/{number}"
            pull_request = f"{self.hub.url}/{repo_id}/discussions/{number}"
        sha = repo.commit(revision, files, message)
        answer = {"commitUrl": f"{self.hub.url}/{repo_id}/commit/{sha}", "commitOid": sha, "success": True}
        self.answer(200, answer | {"pullRequestUrl": pull_request})

    # What is read

    def visible(self, repo_id: str, revision: str, token: str) -> Repo | None:
        """The repository, or None after an answer that says why not."""
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and not token):
            self.fail(404 if token else 401, "Repository not found", "RepoNotFound")
        elif revision not in repo.refs and revision not in repo.commits:
            self.fail(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        else:
            return repo
        return None

    def read(self, path: str, token: str) -> None:
        owner, name, *rest = path.split("/", 3)
        action, revision = (rest + ["revision", "main"])[0], unquote(rest[1]) if len(rest) > 1 else "main"
        revision = revision.split("/")[0] if action == "tree" else revision
        repo = self.visible(f"{owner}/{name}", revision, token)
        if repo is None:
            return
        files, sha = repo.files(revision), repo.refs.get(revision, revision)
        if action == "tree":
            self.answer(200, [{"type": "file", "path": p, "size": len(c), "oid": sha} for p, c in files.items()])
        elif action == "revision":
            siblings = [{"rfilename": path} for path in files]
            self.answer(200, {"id": f"{owner}/{name}", "sha": sha, "private": repo.private, "siblings": siblings})
        else:
            self.fail(404, f"this server does not know {self.path}", None)

    def download(self, path: str, token: str) -> None:
        owner, name, action, *rest = path.split("/", 3) if path.count("/") > 1 else ("", "", "")
        revision, _, file = rest[0].partition("/") if action == "resolve" and rest else ("main", "", "")
        revision = unquote(revision)
        repo = self.visible(f"{owner}/{name}", revision, token)
        if repo is None:
            return
        sha, content = repo.refs.get(revision, revision), repo.files(revision).get(unquote(file))
        if content is None:
            self.fail(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": sha})
            return
        status, span = 200, {}
        if wanted := self.headers.get("Range"):
            first = int(wanted.removeprefix("bytes=").split("-")[0])
            status, span = 206, {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"}
            content = content[first:]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        self.answer(status, content, {"ETag": etag, "X-Repo-Commit": sha} | span)

    # The wire

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def json(self) -> Any:
        return json.loads(self.body())

    @staticmethod
    def validated(card: dict[str, Any]) -> dict[str, Any]:
        """The Hub demands metadata at the top of a card."""
        problems = [] if card["content"].startswith("---\n") else [{"message": "empty or missing yaml metadata"}]
        return {"errors": [], "warnings": problems}

    def fail(self, status: int, message: str, code: str | None, headers: dict[str, str] | None = None) -> None:
        headers = dict(headers or {}) | {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer(status, {"error": message}, headers)
        if status >= 400 and self.command in ("POST", "PUT"):
            self.close_connection = True  # a body may be left unread

    def answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        if not isinstance(content, bytes):
            self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()
