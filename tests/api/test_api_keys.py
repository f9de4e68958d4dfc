"""`/v1/keys`: what becomes of a key, and that nobody but its maker sees its secret."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_memory import FakeMemory
from guarded_server import Guarded, guarded, refused, serve, stored_config
from live_server import live_server

from memkv.memory.access_keys import AccessKeys
from memkv.memory.stored import StoredMemory
from memkv.store import catalog_keys
from memkv.store.catalog_keys import KeyStatements
from memkv.store.database import Database, parse_database_url
from memkv.store.rows import DEFAULT_TENANT
from memkv.store.schema import require_schema
from memkv.wire import AccessKeyCreate, AccessKeyPatch

__all__ = ["guarded"]


class TestKeys:
    """`/v1/keys`."""

    def test_a_life(self, guarded: Guarded) -> None:
        def admin(method: str, path: str, **more: Any) -> httpx2.Response:
            return guarded.ask(guarded.admin.secret, method, path, **more)

        asked = {"name": "wiki", "scope": "write", "collections": ["wiki"], "expires_in": 3600}
        made = admin("POST", "/v1/keys", json=asked).json()
        path, secret = f"/v1/keys/{made['id']}", made["secret"]
        assert re.fullmatch(r"mkv_[0-9a-f]{64}", secret)
        assert secret.startswith(made["prefix"])
        shown = admin("GET", path).json()
        assert shown == {name: value for name, value in made.items() if name != "secret"}
        assert (shown["status"], shown["collections"], shown["revoked_at"]) == ("valid", ["wiki"], "")
        changed = admin("PATCH", path, json={"scope": "read", "expires_in": 0}).json()
        assert (changed["scope"], changed["expires_at"], changed["name"]) == ("read", "", "wiki")
        assert guarded.ask(secret, "GET", "/v1/info").status_code == 200
        rotated = admin("POST", f"{path}/rotate")
        assert rotated.headers["cache-control"] == "no-store"
        refused(guarded.ask(secret, "GET", "/v1/info"), 401)
        secret = rotated.json()["secret"]
        assert guarded.ask(secret, "GET", "/v1/info").status_code == 200
        assert admin("DELETE", path).status_code == 204
        assert "revoked" in refused(guarded.ask(secret, "GET", "/v1/info"), 401)["detail"]
        for again in (("DELETE", path), ("PATCH", path), ("POST", f"{path}/rotate")):
            more = {"json": {}} if again[0] == "PATCH" else {}
            assert refused(admin(*again, **more), 409)
        listed = admin("GET", "/v1/keys", params={"limit": 1, "after": made["id"], "order": "asc"})
        assert listed.status_code == 200
        assert admin("GET", path).json()["status"] == "revoked"
        assert refused(admin("GET", "/v1/keys/key_0"), 404)["code"] == "key_not_found"

    @pytest.mark.parametrize(
        "wrong",
        [
            {"collections": []},
            {"collections": ["a b"]},
            {"scope": "root"},
            {"expires_in": -1},
            {"name": "n" * 129},
            {"scope": "admin", "collections": ["wiki"]},
            {"secret": "mine"},
        ],
    )
    def test_what_no_key_can_be(self, guarded: Guarded, wrong: dict[str, Any]) -> None:
        refused(guarded.ask(guarded.admin.secret, "POST", "/v1/keys", json=wrong), 400)
        key = guarded.key(collections=["wiki"])
        wrong = {name: value for name, value in wrong.items() if name != "collections" or value != ["wiki"]}
        refused(guarded.ask(guarded.admin.secret, "PATCH", f"/v1/keys/{key.id}", json=wrong), 400)

    def test_an_expired_key_is_not_rotated(self, guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
        key = guarded.key(expires_in=1)
        path = f"/v1/keys/{key.id}"
        later = catalog_keys.now() + timedelta(seconds=2)

        class Later:
            @staticmethod
            def now(_: Any) -> Any:
                return later

        monkeypatch.setattr("memkv.memory.replies.datetime", Later)
        assert "expired" in refused(guarded.ask(key.secret, "GET", "/v1/info"), 401)["detail"]
        told = refused(guarded.ask(guarded.admin.secret, "POST", f"{path}/rotate"), 409)
        assert f"memkv keys update {key.id} --expires" in told["hint"]
        changed = guarded.ask(guarded.admin.secret, "PATCH", path, json={"expires_in": 60})
        assert changed.json()["status"] == "valid"
        assert guarded.ask(guarded.admin.secret, "POST", f"{path}/rotate").status_code == 200


class TestTheLastAdminKey:
    @pytest.fixture
    def alone(self, tmp_path: Path) -> Iterator[Guarded]:
        database = Database(parse_database_url(None, tmp_path))
        require_schema(database, upgrade=False)
        keys = AccessKeys(KeyStatements(database))
        with closing(database):
            yield from serve(FakeMemory(keys=keys), keys)

    def test_goes_by_force_alone(self, alone: Guarded) -> None:
        path = f"/v1/keys/{alone.admin.id}"
        assert "data directory" in refused(alone.ask(alone.admin.secret, "DELETE", path), 409)["hint"]
        refused(alone.ask(alone.admin.secret, "PATCH", path, json={"scope": "write"}), 409)
        assert not alone.keys.lack_admin()
        gone = alone.ask(alone.admin.secret, "DELETE", path, params={"force": "true"})
        assert gone.status_code == 204
        assert alone.keys.lack_admin()
        refused(alone.http.get("/v1/info"), 401)  # it does not open again

    def test_says_so_where_it_will_expire(self, alone: Guarded) -> None:
        path = f"/v1/keys/{alone.admin.id}"
        changed = alone.ask(alone.admin.secret, "PATCH", path, json={"expires_in": 60}).json()
        assert ["data directory" in note for note in changed["notes"]] == [True]
        assert alone.keys.create(AccessKeyCreate(scope="admin", expires_in=30)).notes == []
        longer = alone.keys.create(AccessKeyCreate(scope="admin", expires_in=90))
        assert len(longer.notes) == 1
        assert alone.keys.update(alone.admin.id, AccessKeyPatch(name="ops")).notes == []
        assert alone.keys.rotate(longer.id).notes == longer.notes


def test_no_secret_is_shown_or_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither in a log, an error, a `repr`, nor in any file of the store."""
    config = stored_config(tmp_path)
    caplog.set_level("DEBUG")
    secrets = []
    with StoredMemory.open_store(config) as memory, live_server(memory, config) as server:
        admin = memory.keys.create(AccessKeyCreate(scope="admin"))
        secrets.append(admin.secret)
        headers = {"Authorization": f"Bearer {admin.secret}"}
        shown = [repr(admin), str(admin)]
        for number in range(3):
            made = httpx2.post(f"{server.url}/v1/keys", json={"name": str(number)}, headers=headers).json()
            secrets.append(made["secret"])
            asked = {"Authorization": f"Bearer {made['secret']}"}
            shown.append(httpx2.get(f"{server.url}/v1/keys", headers=asked).text)
            shown.append(httpx2.get(f"{server.url}/v1/jobs/{made['id']}", headers=asked).text)
            shown.append(httpx2.get(f"{server.url}/v1/keys", headers=headers).text)
        memory._store.jobs.create(DEFAULT_TENANT, "", "verify", ())
    captured = capfd.readouterr()
    shown += [caplog.text, captured.out, captured.err]
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for secret in secrets:
        assert not any(secret in text for text in shown)
        assert not any(secret.encode() in data for data in files)
        assert not any(bytes.fromhex(secret[4:]) in data for data in files)
