"""Chat completions that must follow a schema: ten JSON answers and ten tool calls, and what makes an answer valid."""

from __future__ import annotations

import json

from jsonschema import validate

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}


def tool(name, **properties):
    """A function as the OpenAI API takes it; SGLang holds the arguments to the schema only with ``strict``."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": name, "strict": True, "parameters": schema}}


def user(text):
    return [{"role": "user", "content": text}]


def as_json(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


WEATHER = tool("weather", city={"type": "string", "maxLength": 20}, unit={"enum": ["celsius", "fahrenheit"]})
SUM = tool("add", a={"type": "integer"}, b={"type": "integer"})
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
#: Twenty: ten JSON answers and ten tool calls.
STRUCTURED = [
    *(
        {"messages": user(f"Describe {who} in JSON."), "response_format": as_json(PERSON)}
        for who in ("a person", "a sailor", "your best friend", "a doctor", "a child")
    ),
    *(
        {"messages": user(f"Where is {what}? Answer in JSON."), "response_format": as_json(CITY)}
        for what in ("the Louvre", "the White House", "the Colosseum", "Big Ben", "the Kremlin")
    ),
    *(
        {"messages": user(f"What is the weather in {city}?"), "tools": [WEATHER], "tool_choice": "required"}
        for city in ("Paris", "Berlin", "Oslo", "Lima")
    ),
    *(
        {"messages": user(f"What is {a} + {b}?"), "tools": [SUM, WEATHER], "tool_choice": "required"}
        for a, b in ((2, 3), (10, 7), (40, 2))
    ),
    *(
        {
            "messages": user(f"Call the function for {city}."),
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        }
        for city in ("Rome", "Tokyo", "Cairo")
    ),
]


def chat(server, **body):
    """The choice of a greedy chat completion; ids of tool calls, which are drawn, are left out."""
    reply = server.post("/v1/chat/completions", {"model": "x", "temperature": 0, "max_tokens": 96, **body})
    choice = reply["choices"][0]
    for call in choice["message"].get("tool_calls") or ():
        del call["id"]
    return choice


def assert_valid(body, choice):
    """What the request's schema asks for; SGLang's JSON grammars end by themselves."""
    message = choice["message"]
    if body.get("response_format"):
        answer, schema = json.loads(message["content"]), body["response_format"]["json_schema"]["schema"]
        validate(answer, schema)
        return
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    assert message["tool_calls"]
    for call in message["tool_calls"]:
        validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
