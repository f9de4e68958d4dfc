"""What the OpenAPI document says of a route beyond its signature."""

from __future__ import annotations

from dataclasses import dataclass

from litestar.openapi.spec import OpenAPIMediaType, OpenAPIType, Operation, Reference, RequestBody, Schema

from memkv.wire import DocumentCreate

SCHEMA_REF = "#/components/schemas/{name}"


@dataclass
class IngestOperation(Operation):
    """A body that is one JSON text or a form with files."""

    def __post_init__(self) -> None:
        text = OpenAPIType.STRING
        form = Schema(
            type=OpenAPIType.OBJECT,
            required=["file"],
            properties={
                "file": Schema(
                    type=OpenAPIType.ARRAY,
                    items=Schema(type=text, content_media_type="application/octet-stream"),
                    description="One or more text or Markdown files",
                ),
                "external_id": Schema(
                    type=OpenAPIType.ARRAY, items=Schema(type=text), description="One for each file"
                ),
                "title": Schema(
                    type=OpenAPIType.ARRAY, items=Schema(type=text), description="One for each file"
                ),
                "metadata": Schema(
                    type=OpenAPIType.ARRAY,
                    items=Schema(type=text, content_media_type="application/json"),
                    description="A JSON object for all files, or one for each",
                ),
            },
        )
        self.request_body = RequestBody(
            required=True,
            content={
                "application/json": OpenAPIMediaType(schema=_reference(DocumentCreate.__name__)),
                "multipart/form-data": OpenAPIMediaType(schema=form),
            },
        )


@dataclass
class QueryOperation(Operation):
    """An answer that is one JSON object or a stream of events."""

    def __post_init__(self) -> None:
        success = (self.responses or {}).get("200")
        assert success is not None and not isinstance(success, Reference), "bug: the route answers 200"
        assert success.content is not None, "bug: the route answers with content"
        success.description = "The answer; as events, one `QueryEvent` each, with `stream` or `Accept`"
        success.content["text/event-stream"] = OpenAPIMediaType(schema=_reference("QueryEvent"))


def _reference(name: str) -> Reference:
    return Reference(ref=SCHEMA_REF.format(name=name))
