"""The only home of SQL: the tables, every statement, and what differs between databases."""
