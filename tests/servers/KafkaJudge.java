// Kafka's own client, which tests let write records, and read what we wrote: write|read BROKERS TOPIC ...
import java.util.*; import java.time.Duration; import java.nio.charset.StandardCharsets;
import org.apache.kafka.clients.producer.*; import org.apache.kafka.clients.consumer.*; import org.apache.kafka.common.*; import org.apache.kafka.common.serialization.*;
public class KafkaJudge {
  public static void main(String[] a) throws Exception {
    Properties p = new Properties(); p.put("bootstrap.servers", a[1]);
    if (a[0].equals("write")) {
      p.put("compression.type", a[3]); p.put("batch.size", "200000"); p.put("linger.ms", "100");
      try (KafkaProducer<byte[], byte[]> out = new KafkaProducer<>(p, new ByteArraySerializer(), new ByteArraySerializer())) {
        for (int i = 0; i < Integer.parseInt(a[4]); i++) {
          ProducerRecord<byte[], byte[]> r = new ProducerRecord<>(a[2], 0, 1764000000000L + i, i % 3 == 0 ? null : ("k" + i).getBytes(), i % 7 == 0 ? null : ("value " + i).repeat(i % 20).getBytes());
          if (i % 5 == 0) r.headers().add("n", Integer.toString(i).getBytes());
          out.send(r);
        }
      }
    } else {
      try (KafkaConsumer<byte[], byte[]> in = new KafkaConsumer<>(p, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
        TopicPartition t = new TopicPartition(a[2], 0); in.assign(List.of(t)); in.seekToBeginning(List.of(t));
        int left = Integer.parseInt(a[3]);
        while (left > 0) for (ConsumerRecord<byte[], byte[]> r : in.poll(Duration.ofSeconds(1))) {
          left--; StringBuilder h = new StringBuilder(); r.headers().forEach(x -> h.append(x.key()).append('=').append(x.value() == null ? "null" : HexFormat.of().formatHex(x.value())).append(';'));
          System.out.println(r.offset() + " " + r.timestamp() + " " + (r.key() == null ? "null" : "x" + HexFormat.of().formatHex(r.key())) + " " + (r.value() == null ? "null" : "x" + HexFormat.of().formatHex(r.value())) + " " + h);
        }
      }
    }
  }
}
