"""Supervision of operating-system processes, after Erlang/OTP. Knows neither SQL nor flows.

Statement numbers in this package refer to the list that the process tests quote.
"""
