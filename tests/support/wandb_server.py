"""A server on loopback that answers the real client of Weights & Biases as far as records need it."""

import gzip
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WandbServer(ThreadingHTTPServer):
    """history: the rows that it received; asked: the names of the questions, with their variables."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.uri = f"http://127.0.0.1:{self.server_port}"
        self.history, self.asked, self.codes = [], [], []

    def answer(self, name, variables):
        if name == "UpsertBucket":
            project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": variables["name"], "config": "{}", "historyLineCount": 0, "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.uri}/{file}"} for file in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {}


class Answers(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def do_PUT(self):
        self.body()
        self.reply({})

    def do_POST(self):
        told = json.loads(self.body() or "{}")
        if "file_stream" in self.path:
            rows = told.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.server.history += map(json.loads, rows)
            self.server.codes += [told["exitcode"]] if told.get("complete") else []
            self.reply({})
            return
        name = re.search(r"(?:query|mutation)\s+(\w+)", told.get("query", ""))
        variables = told.get("variables") or {}
        self.server.asked.append((name and name[1], variables))
        self.reply({"data": self.server.answer(name and name[1], variables)})

    def body(self):
        content = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

    def reply(self, values):
        content = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
