"""The batch API of a server of chats: requests go in files, and what was sent is found again after a restart."""
