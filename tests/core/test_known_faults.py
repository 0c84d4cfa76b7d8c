"""What has gone wrong in servers of this kind, and the tests that would notice if it went wrong here.

Each fault names at least one test; a test that is renamed or removed must be replaced here too.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

NAMES, FETCH = "encoder/server/test_names.py", "encoder/server/test_fetch.py"
TRANSPORT, IMPORTS = "core/test_transport.py", "core/test_imports.py"
IMAGE, SERVER = "encoder/media/test_image.py", "encoder/server/test_server.py"
VIDEO, LONG_VIDEO = "encoder/media/test_video.py", "encoder/server/test_long_video.py"
RANKS, ARENAS, SHM = (
    "encoder/server/test_ranks.py",
    "shared_cache/test_opening.py",
    "shared_cache/test_shm_cache.py",
)
MEDIA_KEY, RADIX_KEYS = "core/test_media_key.py", "llm/radix/test_keys.py"
MEMORY, RETURNED, TREE = "llm/engine/test_memory.py", "llm/engine/test_answers.py", "llm/radix/test_tree.py"
HOSTILE = "process/test_hostile_origin.py"
PREFIX, PARSE, ANSWERS = "llm/engine/test_prefix_cache.py", "gateway/test_parse.py", "process/test_answers.py"

FAULTS: dict[str, tuple[str, ...]] = {
    # Security
    "an allow-list of hosts is checked for the first URL only, not for redirects": (
        f"{NAMES}::test_a_hop_off_the_domain_list_is_not_even_resolved",
        f"{NAMES}::test_every_hop_is_judged",
        f"{NAMES}::test_a_chain_ends_after_the_fifth_redirect",
        f"{FETCH}::test_every_hop_is_judged",
        f"{FETCH}::test_domain_lists_fail_closed_and_match_whole_labels",
        f"{HOSTILE}::test_nobody_forbidden_was_even_connected_to",
    ),
    "host names like metadata.google.internal, LOCALHOST and localhost. pass a block-list": (
        f"{NAMES}::test_names_of_private_addresses_and_unknown_ones_sound_alike",
        f"{FETCH}::test_spellings_of_loopback_are_refused_by_what_they_resolve_to",
        f"{HOSTILE}::test_a_hostile_url_is_refused_by_part_and_in_time",
        f"{HOSTILE}::test_no_error_tells_an_address_that_its_url_did_not",
    ),
    "spellings of addresses (2130706433, 127.1, [::1], names of loopback) pass the filter": (
        f"{FETCH}::test_urls_that_are_refused_unresolved",
        f"{FETCH}::test_addresses_that_are_not_public",
        f"{NAMES}::test_every_hop_is_judged",
        f"{HOSTILE}::test_a_hostile_url_is_refused_by_part_and_in_time",
    ),
    "a name is resolved once to be judged and again to be connected to (rebinding)": (
        f"{NAMES}::test_what_was_judged_is_what_is_connected_to",
        f"{NAMES}::test_nothing_private_was_reached",
        f"{HOSTILE}::test_a_name_is_asked_for_once_a_download",
        f"{HOSTILE}::test_nobody_forbidden_was_even_connected_to",
    ),
    "what comes over a socket is unpickled": (
        f"{TRANSPORT}::test_pickle_is_not_executed",
        f"{TRANSPORT}::test_what_is_not_the_protocol_is_counted_and_dropped",
        f"{IMPORTS}::test_no_module_pickles_or_imports_a_stage_by_its_bare_name",
    ),
    "a dump file is unpickled, or a deny-list of pickle's functions is got around": (
        f"{IMPORTS}::test_no_module_pickles_or_imports_a_stage_by_its_bare_name",
    ),
    "a caller's address makes the engine connect out": (
        f"{TRANSPORT}::test_send_refuses_addresses_that_no_peer_has",
        f"{TRANSPORT}::test_connecting_off_loopback_needs_the_key_too",
    ),
    "an inbox listens on all interfaces without a key": (
        f"{TRANSPORT}::test_only_loopback_goes_without_a_key",
        f"{TRANSPORT}::test_others_are_refused",
    ),
    # Ingest
    "a picture's header promises more pixels than there is memory": (
        f"{IMAGE}::test_header_bombs_are_refused_before_the_raster_exists",
        "encoder/server/test_decode_pool.py::test_memory_bombs_hit_the_limit_of_the_worker",
    ),
    "a large picture is decoded whole before it is made small": (
        f"{IMAGE}::test_large_pictures_come_reduced_and_alike",
        f"{IMAGE}::test_the_memory_of_a_large_picture_is_bounded",
    ),
    "a truncated picture is answered 500": (
        f"{IMAGE}::test_jpeg_with_its_last_128_bytes_cut_is_refused",
        f"{IMAGE}::test_truncated_files_are_refused",
        f"{ANSWERS}::test_a_bad_item_fails_alone",
    ),
    "garbage, an empty file or an HTML page as a picture is answered 500": (
        f"{IMAGE}::test_what_is_no_image_is_named",
        f"{IMAGE}::test_random_damage_never_raises_anything_else",
        f"{SERVER}::test_64_good_and_bad_items_at_once",
        f"{HOSTILE}::test_a_page_is_no_video_and_no_sound_either",
    ),
    "malformed base64 is answered 500, and the log repeats it": (
        f"{PARSE}::test_a_bad_request_names_its_fault",
        f"{PARSE}::test_an_error_never_repeats_a_payload",
    ),
    "a picture one pixel high or wide crashes": (f"{IMAGE}::test_strips_and_dots_have_a_size",),
    "a grey, transparent or CMYK picture kills the batch that it is in": (
        f"{IMAGE}::test_opaque_modes_become_rgb",
        f"{IMAGE}::test_transparency_shows_the_background",
        f"{IMAGE}::test_sixteen_bit_grey_is_scaled_and_not_clipped",
    ),
    "a video as a list of frames in one data URL is answered 500 without a word": (
        f"{PARSE}::test_frames_in_one_url_are_refused_by_name",
    ),
    "a body of 10 MB is too large, and nothing can be set": (
        "gateway/test_http.py::test_a_body_that_is_too_large_is_refused_before_it_is_read",
    ),
    "a slow image host blocks everyone else": (
        f"{FETCH}::test_slow_hosts_do_not_wait_for_each_other",
        f"{SERVER}::test_urls_overload_and_the_end_of_the_process",
        f"{SERVER}::test_health_answers_while_busy",
        f"{HOSTILE}::test_good_pictures_beside_them_are_answered",
    ),
    "a server drips bytes for ever, or sends without end or length": (
        f"{FETCH}::test_silence_and_dripping_are_cut",
        f"{FETCH}::test_a_server_that_only_promises_an_answer_is_cut_off",
        f"{FETCH}::test_size_is_limited_by_header_and_while_streaming",
        f"{FETCH}::test_compressed_bodies_are_inflated_up_to_the_limit",
        f"{HOSTILE}::test_a_hostile_url_is_refused_by_part_and_in_time",
        f"{HOSTILE}::test_the_deadline_of_a_request_ends_its_downloads",
    ),
    "packed content inflates to nothing for ever, or goes on behind its end": (
        f"{FETCH}::test_packed_bodies_that_do_not_end_are_not_kept",
    ),
    "what attacks the reader of TLS, HTTP or DNS ends the server": (
        "encoder/server/test_fetch_pool.py::test_a_server_that_ends_workers_costs_its_item_alone",
    ),
    # Identity of media
    "views and copies of the same bytes have different keys": (
        f"{MEDIA_KEY}::test_views_of_any_item_size_hash_as_their_bytes",
    ),
    "6x4 and 4x6 pixels of the same bytes share a key": (
        f"{MEDIA_KEY}::test_moving_a_boundary_changes_the_digest",
        f"{MEDIA_KEY}::test_parts_do_not_run_into_each_other",
    ),
    "only the beginning of an item is hashed": (f"{MEDIA_KEY}::test_every_byte_counts",),
    "options of decoding are no part of the key": (
        f"{MEDIA_KEY}::test_every_option_takes_part",
        f"{SERVER}::test_options_are_part_of_the_key",
    ),
    "short hashes stand for pictures in the prefix cache, or one value over the whole span": (
        f"{RADIX_KEYS}::test_media_ids_lie_outside_of_the_vocabulary_and_differ_by_position_and_item",
        f"{PREFIX}::test_pictures_are_told_apart_by_their_content",
    ),
    "the prefix cache sees the same placeholders for different pictures": (
        f"{RADIX_KEYS}::test_same_item_gives_the_same_ids_and_another_item_shares_only_the_text_before",
        f"{PREFIX}::test_pictures_are_told_apart_by_their_content",
    ),
    "malformed spans are cached as plain placeholders": (
        f"{RADIX_KEYS}::test_malformed_spans_are_refused_rather_than_cached_as_placeholders",
        f"{PREFIX}::test_without_a_content_key_nothing_is_cached",
    ),
    # Isolation
    "a request whose embeddings don't fit its placeholders kills the engine": (
        "llm/engine/test_engine.py::test_wrong_rows_fail_their_own_request_only",
        "llm/engine/test_prompt.py::test_what_does_not_fit_is_refused",
    ),
    "a request that killed a worker is sent to the next one": (
        "gateway/test_crowd.py::test_a_poison_request_reaches_one_worker_only",
        "gateway/test_failures.py::test_a_lost_worker_fails_its_requests_and_nothing_else",
        "encoder/server/test_rank_policy.py::test_one_killer_ends_two_ranks_at_most_and_no_neighbour_fails",
    ),
    "a picture and a sound in one request crash": (
        f"{ANSWERS}::test_a_picture_and_a_sound_in_one_request",
    ),
    "two pictures in one request are miscounted": (
        f"{ANSWERS}::test_order_of_items_is_kept",
        "gateway/test_chat.py::test_media_of_all_kinds_keep_their_order",
    ),
    "a sound longer than 30 s is a TypeError": (
        f"{SERVER}::test_a_sound_longer_than_a_segment_comes_in_chunks",
        "encoder/media/test_audio.py::test_length_limit_is_told",
    ),
    # Video
    "a container claims more frames than its decoder gives": (
        f"{VIDEO}::test_truncated_file_uses_the_frames_that_exist",
        f"{VIDEO}::test_damage_in_the_middle_costs_few_frames",
    ),
    "more frames are asked for than a clip has": (
        f"{VIDEO}::test_short_clips_give_what_they_have",
        "encoder/media/test_sampling.py::test_more_frames_asked_than_exist",
    ),
    "a number of frames is asked for, and the clip errors or gives others": (
        f"{SERVER}::test_a_clip_gives_the_number_of_frames_that_is_asked_for",
        "encoder/media/test_sampling.py::test_more_frames_asked_than_exist",
    ),
    "frames that were sampled are sampled again": (
        f"{VIDEO}::test_sampled_frames_are_the_ones_named",
        f"{SERVER}::test_a_clip_comes_as_units_with_their_times",
    ),
    "two ways of decoding give other frames, or other numbers of tokens": (
        f"{VIDEO}::test_frames_equal_an_independent_decode_bit_for_bit",
        f"{VIDEO}::test_jumping_between_keyframes_changes_nothing",
        f"{VIDEO}::test_runs_and_slices_give_the_same_in_any_order",
    ),
    "a long clip is decoded by one thread": (
        f"{LONG_VIDEO}::test_the_first_embeddings_of_an_hour_leave_early_and_all_of_them_come",
        "encoder/media/test_cutting.py::test_one_keyframe_is_one_run_and_many_are_many",
    ),
    "memory grows with the length of a clip, or while nobody reads it": (
        f"{LONG_VIDEO}::test_memory_does_not_grow_with_the_length_of_a_clip",
        f"{LONG_VIDEO}::test_a_clip_given_up_after_its_first_embeddings_is_decoded_no_further",
    ),
    "a long or large clip has no budget of frames and pixels": (
        f"{VIDEO}::test_limits_are_told",
        f"{VIDEO}::test_huge_frames_come_reduced",
        "encoder/media/test_sampling.py::test_sampled_frames_are_within_all_limits",
    ),
    # Encoders and prefill
    "a burst of requests with pictures loses some of them, or hangs near its end": (
        f"{RANKS}::test_200_requests_with_294_images_lose_none_and_health_answers",
        f"{ANSWERS}::test_200_requests_with_294_pictures_at_once_are_all_answered",
        f"{ANSWERS}::test_requests_of_many_megabytes_of_photographs_are_all_answered",
    ),
    "what was given up or has run out of time is encoded all the same": (
        f"{RANKS}::test_items_that_nobody_wants_are_never_embedded",
    ),
    "clients that leave in crowds leave decoded media in memory": (
        "process/test_disconnects.py::test_disconnects_at_random_moments_leave_nothing",
        f"{SERVER}::test_aborts_right_behind_their_jobs_leave_nothing",
    ),
    "the same URL is downloaded once for each who asks at once": (
        "encoder/server/test_downloads.py::test_all_who_ask_at_once_share_one_download",
    ),
    "encoder ranks wait for each other when their shares differ": (
        f"{RANKS}::test_both_ranks_take_their_share_and_agree",
        f"{RANKS}::test_killed_ranks_cost_no_request_and_leave_nothing",
    ),
    "the size of an encoder's cache is not kept to, and 0 does not turn it off": (
        "encoder/server/test_kept.py::test_no_capacity_keeps_nothing",
        f"{ARENAS}::test_sizes_below_an_arena",
        "shared_cache/test_contract.py::test_size_is_bounded_and_the_coldest_goes_first",
    ),
    "nobody can see how often cached embeddings are found": (
        "encoder/server/test_kept.py::test_two_encoders_share_what_they_made",
        f"{SERVER}::test_metrics_count_items_batches_and_failures",
    ),
    "nobody can see what each rank of an encoder does": (
        f"{RANKS}::test_both_ranks_take_their_share_and_agree",
        f"{RANKS}::test_killed_ranks_cost_no_request_and_leave_nothing",
    ),
    # Who gets what
    "a hash ring keeps a node that has left, or moves the keys of others": (
        "core/test_hash_ring.py::test_a_lost_nodes_keys_alone_move_and_to_their_next_node",
        "core/test_hash_ring.py::test_nodes_that_come_and_go_move_their_own_keys_only",
        "gateway/test_fleet.py::test_media_stay_with_their_encoder_unless_it_is_overloaded_or_gone",
    ),
    "requests that nothing tells apart all go to the first worker": (
        "gateway/test_fleet.py::test_equal_workers_share_the_work",
        "gateway/test_fleet.py::test_the_least_loaded_worker_is_chosen_and_ties_go_to_the_one_that_waited",
    ),
    # Shared memory
    "a full /dev/shm kills who writes to it": (f"{ARENAS}::test_too_small_file_system_fails_cleanly",),
    "shared memory goes while somebody still reads it": (
        f"{SHM}::test_closing_waits_for_the_last_view",
        f"{SHM}::test_arena_goes_though_a_closed_process_still_reads_it",
        "shared_cache/test_contract.py::test_leased_entry_is_never_overwritten",
    ),
    "shared memory stays when processes are killed, or end at the same moment": (
        f"{ARENAS}::test_kills_and_restarts_leave_one_arena",
        f"{ARENAS}::test_two_that_close_at_once_leave_nothing",
        f"{RANKS}::test_a_killed_server_takes_its_processes_along_and_its_memory_is_found_again",
    ),
    "a start cleans up what belongs to others": (f"{ARENAS}::test_sweep_removes_own_orphans_only",),
    # KV, windows and the prefix cache
    "a prefix hit reads what another request left in the window": (
        f"{PREFIX}::test_the_same_prompt_again",
        f"{PREFIX}::test_what_a_hit_hands_over_is_what_a_cold_run_does",
    ),
    "window slots leak, or a prefix with a hole in its window is taken": (
        f"{PREFIX}::test_random_traffic_over_a_tiny_pool",
        "llm/radix/test_state_machine.py::test_random_traffic_agrees_with_the_dict",
        "llm/radix/test_mutants.py::test_a_broken_rule_is_noticed",
    ),
    "what an unfinished prompt has moved past is cached as if its window were live": (
        "llm/engine/test_engine_doc.py::test_the_drawings_are_what_the_engine_does",
    ),
    "hits fall to nothing for all sessions long before the pool is full": (
        f"{TREE}::test_hits_stay_until_the_pool_is_really_full",
        f"{TREE}::test_one_window_a_session_is_enough",
    ),
    "NaN in the pages of a former owner reaches a later request": (
        "llm/engine/test_paged_attention.py::test_stale_garbage_never_reaches_a_later_owner",
        f"{PREFIX}::test_nan_is_not_cached",
        f"{RETURNED}::test_answers_that_do_not_fit_are_refused",
    ),
    "nothing ever hits, and nobody is told": (f"{PREFIX}::test_missing_windows_are_told",),
    "a next turn finds no window to start from": (
        f"{PREFIX}::test_turns_with_the_answers_in_the_history",
        f"{RETURNED}::test_answers_are_not_prefilled_again",
        "llm/engine/test_stages.py::test_answers_are_cached_where_their_prompts_are",
    ),
    "a request hangs although much could be evicted": (f"{PREFIX}::test_much_evictable_and_little_free",),
    "requests wait for each other's pages for ever": (
        f"{MEMORY}::test_no_deadlock_in_too_little_memory",
        "llm/engine/test_scheduler.py::test_everyone_gets_through_in_any_memory",
    ),
    "a request that ran out of pages while it was decoded never comes back": (
        f"{MEMORY}::test_no_deadlock_in_too_little_memory",
        "llm/engine/test_engine.py::test_retracted_and_resumed",
    ),
    "a prompt that prefill refuses as too long is decoded all the same": (
        "llm/engine/test_engine.py::test_limits_become_typed_errors",
        "llm/engine/test_stages.py::test_errors_are_typed",
        "llm/engine/test_stage_rules.py::test_decode_refuses_what_can_never_fit",
    ),
    "a prefill worker that is busy with prompts or moves KV answers no health check": (
        "llm/engine/test_stages.py::test_health_answers_while_long_prompts_run_and_their_kv_moves",
    ),
    "KV that waits for decode workers piles up without bound": (
        "llm/engine/test_stage_rules.py::test_prefill_waits_while_too_much_kv_waits_for_decode",
        "llm/engine/test_stage_rules.py::test_decode_grants_host_memory_in_order",
        "llm/engine/test_stage_rules.py::test_decode_takes_only_what_it_granted",
    ),
    "a long prompt holds short ones back, or is itself held back for ever": (
        "llm/engine/test_scheduler.py::test_short_prompts_pass_a_long_one_under_way",
        "llm/engine/test_scheduler.py::test_the_wait_of_a_long_prompt_is_bounded",
    ),
    "prompts that begin alike and come together are computed each for itself": (
        "llm/engine/test_sharing.py::test_a_shared_prefix_is_computed_once",
        "llm/engine/test_sharing.py::test_a_follower_goes_on_where_the_first_was_stopped",
    ),
    "clients that leave while retracted leave their KV in host memory": (
        f"{MEMORY}::test_clients_that_leave_while_retracted_leave_nothing",
    ),
    "slots are used again while a transfer still reads them": (
        f"{MEMORY}::test_what_was_handed_over_is_a_copy",
    ),
}  # fmt: skip


@cache
def _tests_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith("test_")
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_test_would_notice(fault: str, repository: Path) -> None:
    for name in FAULTS[fault]:
        file, _, function = name.partition("::")
        assert function in _tests_in(repository / "tests" / file), name
