"""Where collectors put what they hear, and how it becomes part of a dataset."""
