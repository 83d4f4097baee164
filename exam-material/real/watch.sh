export PATH=/work/main/.venv/bin:$PATH PYTHONPATH=/work/wt/exam
cd /work/wt/exam
while true; do
 n=$(for k in 1 2 3 4 5 6; do wc -l < /tmp/exam/real/answers_$k.jsonl 2>/dev/null || echo 0; done | awk '$1>=33{c++}END{print c+0}')
 [ "$n" = 6 ] && break; sleep 10
done
python -m tools.starter_real sheets /tmp/exam/real > /tmp/exam/real/sheets.log 2>&1 && touch /tmp/exam/READY_real_read
