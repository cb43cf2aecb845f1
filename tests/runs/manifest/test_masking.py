"""Tests of what is hidden in texts: secrets are, ordinary text stays."""

from __future__ import annotations

import pytest

from luminosity.runs.manifest.masking import mask_text


@pytest.mark.parametrize(
    "text",
    [
        "password=hunter2",
        "Password: hunter2",
        "PASSWORD = 'hunter2'",
        '{"password": "hunter2"}',
        "{'user': 'me', 'sasl.password': 'hunter2'}",
        '"{\\"password\\": \\"hunter2\\"}"',
        "('sasl.password', 'hunter2')",
        "connect(user='me', password='hunter2', host='h')",
        "login failed (password=hunter2)",
        "lum run p.py --password hunter2 --rows=5",
        "--api-key hunter2",
        "PGPASSWORD=hunter2 psql",
        "DB_PASS=hunter2",
        "pwd=hunter2;Server=x",
        'required username="u" password="hunter2";',
        "client_secret: hunter2",
        "secret_key: 'hunter2'",
        "aws_secret_access_key=hunter2",
        "token=hunter2",
        "'access_token': 'hunter2'",
        "password=b'hunter2'",
        "password='hunter2",
        "Authorization: Bearer hunter2",
        "'Authorization': 'Basic hunter2=='",
        "postgres://me:hunter2@db:5432/x",
        "postgres://me:p@hunter2@db:5432/x",
        "redis://:hunter2@localhost",
        "https://h/x?n=1&token=hunter2",
        "X-Auth-Token: hunter2-hunter2",
        "Bearer hunter2-hunter2",
        "AKIAHUNTER2HUNTER2HU hunter2".replace(" hunter2", ""),
        "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.hunter2",
        "hf_hunter2hunter2hunter2",
    ],
)
def test_a_secret_is_hidden(text: str) -> None:
    masked = mask_text(text)
    assert "hunter2" not in masked.lower()
    assert "***" in masked
    assert mask_text(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "token 5 of 7",
        "tokens=12, max_tokens=96, eos_token_id=2, pad_token=[PAD]",
        "unexpected token: 'else'",
        "Invalid token: ')'",
        "token=5",
        "KeyError: 'password'",
        "password=None",
        "the option --password is required; use --token or --password",
        "password must be given",
        "    token = next(self.tokens)",
        '    password = os.environ["PW"]',
        "connect(password=password)",
        "def f(password: str, token: str = '')",
        "authentication failed: no user",
        "authors=3, passed=5, monkey=banana, primary_key=id",
        "tokenizer: bert-base-uncased-v2",
        "basic understanding, bearer of news",
        "ConnectionError: http://host:80/x?key=5",
        "a@b.com at 12:30, sha256:abcdef0123456789",
        "password=%s, password={password}, password=<hidden>, password=$PASSWORD",
        "JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert mask_text(text) == text
