"""Access keys, kept on both databases."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from store_samples import OpenStore, ingest, new_collection

from memkv.errors import AccessKeyNotFound, BadRequestError, ConflictError
from memkv.store import DEFAULT_TENANT, Store
from memkv.store.catalog_keys import KeyStatements
from memkv.store.catalog_store import now
from memkv.store.database import Database, parse_database_url
from memkv.store.rows import AccessKeyRow, NewAccessKey, PageRequest

ADMIN = NewAccessKey("ops", "admin", None, None)
READER = NewAccessKey("wiki", "read", ("papers", "wiki"), None)


def made(store: Store, new: NewAccessKey, digest: str) -> AccessKeyRow:
    return store.catalog.create_key(new, f"mkv_{digest}", digest * 16)


def test_keys_are_found_by_their_digest_and_listed_without_it(store: Store) -> None:
    catalog = store.catalog
    assert not catalog.has_keys()
    assert catalog.key_of("aaaa" * 16) is None
    admin, reader = made(store, ADMIN, "aaaa"), made(store, READER, "bbbb")
    assert catalog.has_keys()
    assert catalog.key_of("aaaa" * 16) == catalog.get_key(admin.id) == admin
    assert reader.collections == ("papers", "wiki")
    assert catalog.list_keys(PageRequest()).rows == (admin, reader)
    assert catalog.admin_keys() == [admin]
    assert "aaaa" * 16 not in repr(admin)
    with pytest.raises(AccessKeyNotFound):
        catalog.get_key("key_0")
    with pytest.raises(BadRequestError):
        made(store, NewAccessKey("\0", "admin", None, None), "cccc")


def test_the_first_key_is_an_admins(store: Store) -> None:
    with pytest.raises(ConflictError) as caught:
        made(store, READER, "aaaa")
    assert "--scope admin" in caught.value.hint
    assert not store.catalog.has_keys()


def test_settings_and_secret_are_changed_apart(store: Store) -> None:
    made(store, ADMIN, "aaaa")
    key = made(store, READER, "bbbb")
    later = now() + timedelta(days=1)
    changed = store.catalog.change_key(key.id, lambda _: NewAccessKey("new", "write", ("wiki",), later))
    assert (changed.name, changed.scope, changed.collections) == ("new", "write", ("wiki",))
    assert changed.expires_at == later
    assert store.catalog.key_of("bbbb" * 16) == changed
    renewed = store.catalog.renew_secret(key.id, "mkv_cccc", "cccc" * 16)
    assert (renewed.prefix, renewed.id, renewed.scope) == ("mkv_cccc", key.id, "write")
    assert store.catalog.key_of("bbbb" * 16) is None
    assert store.catalog.key_of("cccc" * 16) == renewed


def test_the_last_admin_key_goes_by_force_alone(store: Store) -> None:
    catalog = store.catalog
    expired = NewAccessKey("old", "admin", None, now() - timedelta(seconds=1))
    first, _, second = made(store, ADMIN, "aaaa"), made(store, expired, "bbbb"), made(store, ADMIN, "cccc")
    catalog.revoke_key(first.id)
    for end in (
        lambda force: catalog.revoke_key(second.id, force=force),
        lambda force: catalog.change_key(second.id, lambda _: READER, force=force),
    ):
        with pytest.raises(ConflictError) as caught:
            end(False)
        assert "data directory" in caught.value.hint
    assert catalog.admin_keys() == [second]
    assert catalog.change_key(second.id, lambda _: ADMIN).scope == "admin"
    assert catalog.revoke_key(second.id, force=True).revoked_at is not None
    assert catalog.admin_keys() == []
    assert catalog.has_keys(), "a store that had keys goes on asking for them"


def test_two_admins_that_revoke_each_other_leave_one(
    store: Store, data_dir: Path, database_url: str | None
) -> None:
    """One by the server, one beside it."""
    first, second = made(store, ADMIN, "aaaa"), made(store, ADMIN, "bbbb")
    other = Database(parse_database_url(database_url, data_dir))
    both = threading.Barrier(2)

    def revoke(statements: KeyStatements, key_id: str) -> bool:
        both.wait()
        try:
            statements.revoke_key(key_id)
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(2) as threads:
        asked = [(store.catalog, first.id), (KeyStatements(other), second.id)]
        done = [threads.submit(revoke, *each) for each in asked]
        assert sorted(each.result() for each in done) == [False, True]
    other.close()
    assert len(store.catalog.admin_keys()) == 1


def test_a_revoked_key_is_changed_no_more(store: Store) -> None:
    made(store, ADMIN, "aaaa")
    key = made(store, READER, "bbbb")
    store.catalog.revoke_key(key.id)
    for change in (
        lambda: store.catalog.revoke_key(key.id),
        lambda: store.catalog.change_key(key.id, lambda _: READER),
        lambda: store.catalog.renew_secret(key.id, "mkv_cccc", "cccc" * 16),
    ):
        with pytest.raises(ConflictError, match="revoked"):
            change()
    found = store.catalog.key_of("bbbb" * 16)
    assert found is not None
    assert found.revoked_at is not None


def test_keys_are_made_beside_an_open_store(store: Store, data_dir: Path, database_url: str | None) -> None:
    """As the command line does while a server runs; the server goes on writing."""
    generation = store.catalog.generation()
    other = Database(parse_database_url(database_url, data_dir))
    assert other.allows_other_writers
    key = KeyStatements(other).create_key(ADMIN, "mkv_aaaa", "aaaa" * 16)
    other.close()
    assert store.catalog.key_of("aaaa" * 16) == key
    assert store.catalog.generation() == generation
    store.catalog.create_collection(DEFAULT_TENANT, new_collection())


def test_keys_stay_when_the_store_is_opened_again(open_store: OpenStore) -> None:
    store = open_store()
    key = made(store, ADMIN, "aaaa")
    store.close()
    assert open_store().catalog.key_of("aaaa" * 16) == key


def test_lists_keep_to_the_names_they_are_given(store: Store) -> None:
    for name in ("one", "two", "three"):
        collection = store.catalog.create_collection(DEFAULT_TENANT, new_collection(name))
        ingest(store, collection, f"text of {name}")
    store.jobs.create(DEFAULT_TENANT, "", "verify", ())
    within = frozenset({"one", "three", "none"})

    def names(limit: int, after: str | None = None) -> tuple[str, ...]:
        page = PageRequest(limit=limit, after=after)
        return tuple(
            row.name for row in store.catalog.list_collections(DEFAULT_TENANT, page, within=within).rows
        )

    assert names(20) == ("one", "three")
    assert names(1) == ("one",)
    jobs = store.jobs.list(DEFAULT_TENANT, PageRequest(), within=within).rows
    found = {store.catalog.collection_by_id(DEFAULT_TENANT, job.collection_id).name for job in jobs}
    assert (len(jobs), found) == (2, {"one", "three"})
    assert store.jobs.list(DEFAULT_TENANT, PageRequest(), within=frozenset()).rows == ()
    assert len(store.jobs.list(DEFAULT_TENANT, PageRequest()).rows) == 4
